"""How many requests per second a fleet sustains, by simulation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks.load.lengths import Lengths
from benchmarks.simulate.cost import Hardware
from benchmarks.simulate.fleet import Fleet
from benchmarks.simulate.knee import highest_rate
from benchmarks.simulate.system import SYSTEMS, Setup
from benchmarks.simulate.traffic import Prefixes, Superposed
from core.routing import LeastLoaded, PrefixAware, RoundRobin, RoutedRequest, Router

REPORT_S = 0.25
"""Seconds between two reports of a machine's load to the router, as between those of an engine to
its workers."""
PRECISION = 0.03
NEAR_FACTOR = 1.06
"""Factor by which the search changes the rate until it has bracketed the result, if a rate near the
result is known. Otherwise the factor is 2."""


class BySession(Router):
    """Sends all requests with the same prefix to one machine, as one session.

    The prefix stands for the conversation so far.
    """

    def __init__(self) -> None:
        self._router = PrefixAware()

    def choose(self, request: RoutedRequest, loads: Mapping[str, int]) -> str:
        return self._router.choose(RoutedRequest(str(request.prefixes[0]), ()), loads)


ROUTINGS: dict[str, type[Router]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "sessions": BySession,
    "prefix-aware": PrefixAware,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The requests of one machine's share of the users, and what they expect."""

    trace: list[tuple[float, Lengths]]
    """Arrival seconds and lengths, in order."""
    max_length: int
    """Maximum tokens of prefix, prompt and output together; longer requests are left out."""
    prefixes: Prefixes
    """The prefixes of one machine: N machines have N times as many."""
    duration_s: float
    bound: float
    """Highest mean of latency over output length, in seconds per token."""
    max_sequences: int = 256
    """Maximum sequences that run at once on a machine."""

    def traffic(self, num_machines: int, seed: int) -> Superposed:
        """Return the requests of `num_machines` such services. Raises ValueError as Trace does."""
        prefixes = Prefixes(self.prefixes.count * num_machines, self.prefixes.num_tokens)
        return Superposed(self.trace, self.max_length, prefixes, seed, num_services=num_machines)

    def setup(self, hardware: Hardware) -> Setup:
        has_prefixes = self.prefixes.num_tokens > 0
        return Setup(
            hardware=hardware,
            max_length=self.max_length,
            max_sequences=self.max_sequences,
            caches_prefixes=has_prefixes,
        )


def sustained_rate(
    service: Service,
    hardware: Hardware,
    num_machines: int,
    routing: str,
    *,
    seed: int = 0,
    near: float | None = None,
    progress: Callable[[float], None] = lambda now: None,
) -> float:
    """Return the highest rate, in requests per second, that `paged` serves within the bound.

    Returns 0 if there is no such rate. near: requests per second with which the search begins.
    progress: called with the simulated seconds of each attempt.

    Raises ValueError if a machine has too little memory for one sequence.
    """
    traffic, setup = service.traffic(num_machines, seed), service.setup(hardware)

    def attempt(rate: float) -> float | None:
        arrivals = traffic.arrivals(rate, service.duration_s)
        router, system = ROUTINGS[routing](), SYSTEMS["paged"]
        fleet = Fleet(setup, system, arrivals, router, num_machines, report_s=REPORT_S)
        if not arrivals or fleet.run(service.bound, progress) is None:
            return None
        return len(arrivals) / service.duration_s

    start, factor = (float(num_machines), 2.0) if near is None else (near, NEAR_FACTOR)
    found = highest_rate(attempt, start, PRECISION, factor)
    return found[1] if found else 0.0
