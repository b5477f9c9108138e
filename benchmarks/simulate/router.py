"""Which machine of a fleet gets a request. A router sees requests and answers, and no machine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import count

from benchmarks.simulate.traffic import Arrival


class Router(ABC):
    @abstractmethod
    def choose(self, arrival: Arrival, loads: Sequence[int]) -> int:
        """The machine's index; loads: unanswered requests of each."""


class RoundRobin(Router):
    """One after the other."""

    def __init__(self) -> None:
        self._turns = count()

    def choose(self, arrival: Arrival, loads: Sequence[int]) -> int:
        return next(self._turns) % len(loads)


class LeastLoaded(Router):
    """The one with the fewest unanswered requests; of several the first."""

    def choose(self, arrival: Arrival, loads: Sequence[int]) -> int:
        return min(range(len(loads)), key=loads.__getitem__)


class PrefixAware(Router):
    """Of the machines that have seen the prompt's prefix the least loaded, unless it has too much.

    Too much is more than a quarter above the mean, the request itself included, as in consistent
    hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, 2018). Then, and for a new prefix,
    the least loaded of all gets it, and has seen the prefix from then on.
    """

    MOST_OVER_MEAN = 1.25

    def __init__(self) -> None:
        self._seen: dict[int, set[int]] = {}
        """By prefix: the machines."""

    def choose(self, arrival: Arrival, loads: Sequence[int]) -> int:
        most = self.MOST_OVER_MEAN * (sum(loads) + 1) / len(loads)
        known = self._seen.setdefault(arrival.prefix, set())
        fitting = [index for index in sorted(known) if loads[index] + 1 <= most]
        chosen = min(fitting or range(len(loads)), key=loads.__getitem__)
        known.add(chosen)
        return chosen


ROUTERS: dict[str, type[Router]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "prefix-aware": PrefixAware,
}
