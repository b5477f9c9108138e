"""One page of metrics of all replicas; the label `replica` tells them apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector


def merge_metrics(pages: Sequence[tuple[str, bytes]]) -> bytes:
    """Merge the pages of replicas, each given with the name of its replica."""
    registry = CollectorRegistry()
    registry.register(_Merged(pages))
    return generate_latest(registry)


class _Merged(Collector):
    def __init__(self, pages: Sequence[tuple[str, bytes]]) -> None:
        self._families: dict[str, Metric] = {}
        for replica, page in pages:
            for family in text_string_to_metric_families(page.decode()):
                family.samples = [
                    sample._replace(labels={**sample.labels, "replica": replica})
                    for sample in family.samples
                ]
                merged = self._families.setdefault(family.name, family)
                if merged is not family:
                    merged.samples += family.samples

    def collect(self) -> Iterable[Metric]:
        return self._families.values()
