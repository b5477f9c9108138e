"""Merges the metrics of several engines, models or replicas."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


class MergedMetrics(Collector):
    """Joins the metrics of the same name. Their labels tell the series apart."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._by_name: dict[str, Metric] = {}
        for metric in metrics:
            merged = self._by_name.setdefault(metric.name, metric)
            if merged is not metric:
                merged.samples += metric.samples

    def collect(self) -> Iterable[Metric]:
        return self._by_name.values()
