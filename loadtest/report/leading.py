"""The figure by which the servers of a workload are compared: requests/s, or the latency."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from loadtest.report.style import duration, number
from loadtest.study.results import Run
from loadtest.study.slo import MIN_PACE


class Measure(NamedTuple):
    """A figure of a run."""

    title: str
    value: Callable[[Run], float]
    """Infinite or NaN if it is unknown."""
    text: Callable[[float], str]
    """Formats a value."""
    is_cost: bool
    """Whether less of it is better."""


def _tokens_per_s(run: Run) -> float:
    tokens_per_s = run.measures.tokens_per_s
    return math.nan if tokens_per_s is None else tokens_per_s


def _median_latency(run: Run) -> float:
    """Return the median time in seconds from sending a request to the end of its answer."""
    latency = run.measures.latency
    return latency.p50 if latency else math.inf


def _latency_text(seconds: float) -> str:
    return duration(seconds if math.isfinite(seconds) else None)


THROUGHPUT = Measure("requests/s", lambda run: run.measures.requests_per_s, number, is_cost=False)
TOKENS = Measure("output tokens/s", _tokens_per_s, number, is_cost=False)
LATENCY = Measure("median latency", _median_latency, _latency_text, is_cost=True)


def keep_up(runs: Sequence[Run]) -> bool:
    """Whether all servers answered as fast as requests arrived; False in a closed loop."""
    return all((run.measures.pace or 0.0) >= MIN_PACE for run in runs)


def leading(runs: Sequence[Run]) -> Measure:
    """Return the figure by which the servers of one workload are compared.

    If all keep up with an open loop, their requests/s equal the load's, so the latency leads.
    Variants have another load, so they do not count.
    """
    shown = [run for run in runs if not run.variant]
    return LATENCY if shown and keep_up(shown) else THROUGHPUT
