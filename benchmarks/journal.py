"""What the clients of a load saw, and the figures that follow from it.

Every implementation is measured through this, so that the words mean the same for all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from benchmarks.workload import Request

GIB = 2**30


@dataclass(slots=True)
class Flight:
    """A request and its answer so far."""

    request: Request
    submitted: float
    arrivals: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """When tokens came, in seconds, and how many came together."""
    num_tokens: int = 0

    def take(self, now: float, num_tokens: int) -> bool:
        """Whether the answer is complete with these."""
        self.arrivals.append((now, num_tokens))
        self.num_tokens += num_tokens
        return self.num_tokens >= self.request.max_tokens

    @property
    def wait(self) -> float:
        """Seconds to the first token."""
        return self.arrivals[0][0] - self.submitted

    def gaps(self) -> Iterator[float]:
        """Seconds between arrivals; none where the answer came at once."""
        return (later - earlier for (earlier, _), (later, _) in pairwise(self.arrivals))


@dataclass(slots=True)
class Journal:
    """Of one run of a load. Times are seconds of one clock, memory is in tokens."""

    begin: float
    end: float
    flights: list[Flight] = field(default_factory=list[Flight])
    held: list[int] = field(default_factory=list[int])
    """After each step, what of the KV memory was taken, whether or not anything was in it."""
    filled: list[int] = field(default_factory=list[int])
    """After each step, how much of that held a token of a sequence that runs."""
    pool: int | None = None
    """All KV memory there is; None where it is taken as it comes."""
    num_preemptions: int | None = None

    def figures(self) -> dict[str, Any]:
        """Rates, time to first token, inter-token latency. Half an answer is half a request."""
        begun = [flight for flight in self.flights if flight.arrivals]
        elapsed = self.end - self.begin
        num_requests = sum(flight.num_tokens / flight.request.max_tokens for flight in begun)
        return {
            "requests/s": significant(num_requests / elapsed),
            "tokens/s": round(sum(flight.num_tokens for flight in begun) / elapsed),
            "requests": round(num_requests, 1),
            "seconds": round(elapsed, 1),
            "TTFT ms": spread_ms([flight.wait for flight in begun]),
            "ITL ms": spread_ms([gap for flight in begun for gap in flight.gaps()]),
        }

    def memory(self, bytes_per_token: int) -> dict[str, float | None]:
        """GiB of KV memory; None where it was not seen."""

        def gib(num_tokens: float | None) -> float | None:
            return None if num_tokens is None else significant(num_tokens * bytes_per_token / GIB)

        return {
            "most": gib(max(self.held, default=None)),
            "mean": gib(_mean(self.held)),
            "filled": gib(_mean(self.filled)),
            "pool": gib(self.pool),
        }


def spread_ms(seconds: Sequence[float]) -> dict[str, float | None]:
    """Mean, median and 99th percentile, in ms; None where there is nothing."""
    if not seconds:
        return {"mean": None, "p50": None, "p99": None}
    return {
        "mean": significant(sum(seconds) / len(seconds) * 1e3),
        "p50": significant(percentile(seconds, 0.5) * 1e3),
        "p99": significant(percentile(seconds, 0.99) * 1e3),
    }


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all values do not exceed (nearest rank)."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def significant(value: float) -> float:
    """Rounded to four digits: no measurement here has more."""
    return float(f"{value:.4g}")


def _mean(values: Sequence[int]) -> float | None:
    return sum(values) / len(values) if values else None
