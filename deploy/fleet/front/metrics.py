"""Merges the metrics of all replicas into one page; the label `replica` tells them apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from container.http.merged_metrics import MergedMetrics


def merge_metrics(pages: Sequence[tuple[str, bytes]]) -> bytes:
    """Merge the pages of replicas, each given with the name of its replica."""
    registry = CollectorRegistry()
    registry.register(MergedMetrics(_with_replicas(pages)))
    return generate_latest(registry)


def _with_replicas(pages: Sequence[tuple[str, bytes]]) -> Iterator[Metric]:
    """Yield the metrics of all pages, with the label `replica`."""
    for replica, page in pages:
        for metric in text_string_to_metric_families(page.decode()):
            metric.samples = [
                sample._replace(labels={**sample.labels, "replica": replica})
                for sample in metric.samples
            ]
            yield metric
