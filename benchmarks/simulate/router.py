"""Routers that know only the request and how many requests each machine has not finished."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import count

from benchmarks.simulate.traffic import Arrival


class Router(ABC):
    """Chooses a machine for each request."""

    @abstractmethod
    def choose(self, arrival: Arrival, loads: Sequence[int]) -> int:
        """Return the index of the chosen machine. loads: unfinished requests per machine."""


class RoundRobin(Router):
    """Chooses the machines in turn."""

    def __init__(self) -> None:
        self._turns = count()

    def choose(self, arrival: Arrival, loads: Sequence[int]) -> int:
        return next(self._turns) % len(loads)


class LeastLoaded(Router):
    """Chooses the machine with the fewest unfinished requests; in a tie, the first."""

    def choose(self, arrival: Arrival, loads: Sequence[int]) -> int:
        return min(range(len(loads)), key=loads.__getitem__)


class PrefixAware(Router):
    """Chooses the least loaded machine that has seen the prompt's prefix, unless it is overloaded.

    Overloaded means more than 1.25 times the mean load, including the new request, as in consistent
    hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, 2018). In that case, and for a new
    prefix, the least loaded machine gets the request and counts as having seen the prefix.
    """

    MAX_OVER_MEAN = 1.25

    def __init__(self) -> None:
        self._seen: dict[int, set[int]] = {}
        """Machines that have seen a prefix, by prefix."""

    def choose(self, arrival: Arrival, loads: Sequence[int]) -> int:
        max_load = self.MAX_OVER_MEAN * (sum(loads) + 1) / len(loads)
        known = self._seen.setdefault(arrival.prefix, set())
        fitting = [index for index in sorted(known) if loads[index] + 1 <= max_load]
        chosen = min(fitting or range(len(loads)), key=loads.__getitem__)
        known.add(chosen)
        return chosen


ROUTERS: dict[str, type[Router]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "prefix-aware": PrefixAware,
}
