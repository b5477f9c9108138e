"""Explains why two servers differ, from their measurements alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from loadtest.report.gantt import padding_share
from loadtest.report.regime import memory_wait_share
from loadtest.report.style import duration, number, percent
from loadtest.study.results import Run

MIN_SHARE = 0.05
"""Shares that differ by less do not explain a difference."""


def explanation(lower: Run, higher: Run) -> str:
    """Say how the steps of two runs differ, and what may cause the difference.

    Compares only what was measured, not what is known about strategies. Returns '' if the servers
    export no figures of steps.
    """
    high, low = higher.measures.inside, lower.measures.inside
    if None in (high.batch, high.step_s, low.batch, low.step_s):
        return ""
    parts = [
        f"its steps run {number(high.batch)} sequences against {number(low.batch)}, a step every "
        f"{duration(high.step_s)} against {duration(low.step_s)}"
    ]
    for share, text in _CAUSES:
        first, second = share(higher), share(lower)
        if first is not None and second is not None and abs(first - second) > MIN_SHARE:
            parts.append(text.format(percent(first), percent(second)))
    if None not in (high.preemptions, low.preemptions) and high.preemptions != low.preemptions:
        parts.append(f"{number(high.preemptions)} preemptions against {number(low.preemptions)}")
    return "; ".join(parts)


def _padding(run: Run) -> float | None:
    """Return the padding's share of slot time: 0 if a request frees its slot when it ends."""
    return padding_share(run) if run.strategy in ("dynamic", "") else 0.0


def _queue(run: Run) -> float | None:
    queue, latency = run.measures.queue, run.measures.latency
    return queue.mean / latency.mean if queue and latency and latency.mean else None


def _host(run: Run) -> float | None:
    inside = run.measures.inside
    return inside.host_s / inside.step_s if inside.host_s is not None and inside.step_s else None


_CAUSES: Sequence[tuple[Callable[[Run], float | None], str]] = (
    (
        lambda run: run.measures.inside.kv_filled,
        "it fills {} of its allocated KV memory against {}",
    ),
    (memory_wait_share, "its requests wait for KV memory during {} of the run against {}"),
    (_queue, "its requests queue for {} of their latency against {}"),
    (_padding, "padding is {} of its slot time against {}"),
    (
        lambda run: run.measures.inside.prefix_hits,
        "it finds {} of the prompt tokens in its cache against {}",
    ),
    (_host, "host time is {} of the run against {}"),
)
"""Shares of a run, each with a sentence that compares it in two runs."""
