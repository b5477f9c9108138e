"""Statistics for CloudWatch: a line of JSON on stdout, in the embedded metric format (EMF).

CloudWatch Logs turns such lines into metrics by itself. On SageMaker, a container's output goes
there. The format is specified in CloudWatch's user guide, "Embedded metric format specification".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import msgspec

from core.protocol.facts import Facts
from core.protocol.stats import Histogram, Stats

NAMESPACE = "Longshore"
_TIMES = {
    "QueueTime": "queue",
    "TimeToFirstToken": "first_token",
    "InterTokenLatency": "inter_token",
    "RequestLatency": "end_to_end",
}
"""Metrics that are means over the period, and their histograms in `Stats`."""


class EmfReporter:
    """Writes one line per period. Used by the server's loop only."""

    def __init__(
        self,
        model_name: str,
        period_s: float,
        *,
        write: Callable[[str], None] = lambda line: print(line, flush=True),
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self._model_name = model_name
        self._period_s = period_s
        self._write = write
        self._unix_time = unix_time
        self._due: float | None = None
        self._last = Stats()
        """The statistics of the previous line: counters are reported as their growth since then."""

    def tick(self, facts: Facts, stats: Stats, now: float) -> None:
        """Write a line if the period is over. now: seconds of a monotonic clock."""
        if self._due is None:
            self._due = now + self._period_s
        if now >= self._due:
            self._due = now + self._period_s
            self._write(self._line(facts, stats))
            self._last = stats

    def _line(self, facts: Facts, stats: Stats) -> str:
        counts, seconds = _counts(stats, self._last), _means(stats, self._last)
        percents = {}
        if facts.num_kv_blocks:
            percents["KVCacheUsage"] = 100 * stats.num_held_blocks / facts.num_kv_blocks
        units = {"Count": counts, "Seconds": seconds, "Percent": percents}
        metrics = [{"Name": name, "Unit": unit} for unit in units for name in units[unit]]
        dimensions = {"ModelName": self._model_name, "Batching": facts.batching}
        metadata = {
            "Timestamp": round(self._unix_time() * 1000),
            "CloudWatchMetrics": [
                {"Namespace": NAMESPACE, "Dimensions": [list(dimensions)], "Metrics": metrics}
            ],
        }
        line = {"_aws": metadata, **dimensions, **counts, **seconds, **percents}
        return msgspec.json.encode(line).decode()


def _counts(stats: Stats, last: Stats) -> Mapping[str, int]:
    """Return the gauges as they are, and how much each counter has grown."""

    def growth(name: str) -> int:
        return getattr(stats, name) - getattr(last, name)

    def finished(*reasons: str) -> int:
        return sum(stats.finished.get(key, 0) - last.finished.get(key, 0) for key in reasons)

    return {
        "RequestsRunning": stats.num_running,
        "RequestsWaiting": stats.num_waiting,
        "RequestsFinished": finished("stop", "length"),
        "RequestsFailed": finished("error"),
        "RequestsAborted": sum(stats.aborted.values()) - sum(last.aborted.values()),
        "RequestsRefused": sum(stats.refused.values()) - sum(last.refused.values()),
        "PromptTokens": growth("num_prompt_tokens"),
        "GenerationTokens": growth("num_generated_tokens"),
        "Preemptions": growth("num_swaps") + growth("num_recomputes"),
        "Steps": growth("num_steps"),
    }


def _means(stats: Stats, last: Stats) -> Mapping[str, float]:
    """Return the mean of each time over the values since `last`; leave out times without values."""
    means: dict[str, float] = {}
    for name, attribute in _TIMES.items():
        new: Histogram = getattr(stats, attribute)
        old: Histogram = getattr(last, attribute)
        num_values = sum(new.counts) - sum(old.counts)
        if num_values:
            means[name] = (new.sum - old.sum) / num_values
    return means
