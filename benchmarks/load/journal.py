"""Records of a load as seen by its clients, and the figures computed from them.

Every implementation is measured through this module, so that the figures are comparable.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from benchmarks.load.workload import Request

GIB = 2**30


@dataclass(slots=True)
class RequestRecord:
    """A request and the arrivals of its output tokens."""

    request: Request
    submitted: float
    arrivals: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """Arrival times of tokens in seconds, and how many tokens arrived together."""
    num_tokens: int = 0

    def add_tokens(self, now: float, num_tokens: int) -> bool:
        """Add an arrival; return whether the output is complete."""
        self.arrivals.append((now, num_tokens))
        self.num_tokens += num_tokens
        return self.num_tokens >= self.request.max_tokens

    @property
    def wait(self) -> float:
        """Seconds to the first token."""
        return self.arrivals[0][0] - self.submitted

    def gaps(self) -> Iterator[float]:
        """Return the seconds between arrivals; empty if the whole output arrived at once."""
        return (later - earlier for (earlier, _), (later, _) in pairwise(self.arrivals))


@dataclass(slots=True)
class Journal:
    """Record of one run of a load. Times are in seconds of one clock, memory in tokens."""

    begin: float
    end: float
    records: list[RequestRecord] = field(default_factory=list[RequestRecord])
    held: list[int] = field(default_factory=list[int])
    """KV memory allocated after each step, whether filled or not."""
    filled: list[int] = field(default_factory=list[int])
    """KV memory filled with tokens of running sequences after each step."""
    pool: int | None = None
    """Total KV memory; None if it is allocated on demand."""
    num_preemptions: int | None = None

    def figures(self) -> dict[str, Any]:
        """Return rates, time to first token (TTFT) and inter-token latency (ITL).

        A partly generated output counts as a fraction of a request.
        """
        begun = [record for record in self.records if record.arrivals]
        elapsed = self.end - self.begin
        num_requests = sum(record.num_tokens / record.request.max_tokens for record in begun)
        return {
            "requests/s": significant(num_requests / elapsed),
            "tokens/s": round(sum(record.num_tokens for record in begun) / elapsed),
            "requests": round(num_requests, 1),
            "seconds": round(elapsed, 1),
            "TTFT ms": spread_ms([record.wait for record in begun]),
            "ITL ms": spread_ms([gap for record in begun for gap in record.gaps()]),
        }

    def memory(self, bytes_per_token: int) -> dict[str, float | None]:
        """Return KV memory in GiB; None for values that were not recorded."""

        def gib(num_tokens: float | None) -> float | None:
            return None if num_tokens is None else significant(num_tokens * bytes_per_token / GIB)

        return {
            "most": gib(max(self.held, default=None)),
            "mean": gib(_mean(self.held)),
            "filled": gib(_mean(self.filled)),
            "pool": gib(self.pool),
        }


def spread_ms(seconds: Sequence[float]) -> dict[str, float | None]:
    """Return mean, median and 99th percentile in ms; all None if there are no values."""
    if not seconds:
        return {"mean": None, "p50": None, "p99": None}
    return {
        "mean": significant(sum(seconds) / len(seconds) * 1e3),
        "p50": significant(percentile(seconds, 0.5) * 1e3),
        "p99": significant(percentile(seconds, 0.99) * 1e3),
    }


def percentile(values: Sequence[float], share: float) -> float:
    """Return the nearest-rank percentile: the least one that `share` of `values` do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def significant(value: float) -> float:
    """Round to four significant digits; no measurement here is more precise."""
    return float(f"{value:.4g}")


def _mean(values: Sequence[int]) -> float | None:
    return sum(values) / len(values) if values else None
