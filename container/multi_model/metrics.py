"""The figures of all models as one page for Prometheus; the label model_name tells them apart."""

from __future__ import annotations

from collections.abc import Iterable
from http.client import HTTPException
from pathlib import Path

import gevent
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from container.multi_model.connection import UnixConnection

TIMEOUT_S = 2.0


def merged_metrics(sockets: Iterable[Path]) -> bytes:
    """Asks all of them at once; those that do not answer in time are left out."""
    asked: list[gevent.Greenlet[[], str]] = [gevent.spawn(_metrics, each) for each in sockets]
    gevent.joinall(asked, TIMEOUT_S)
    gevent.killall(asked)
    registry = CollectorRegistry()
    pages = [each.value for each in asked if isinstance(each.value, str)]
    registry.register(_Merged(pages))
    return generate_latest(registry)


class _Merged(Collector):
    def __init__(self, pages: Iterable[str]) -> None:
        self._families: dict[str, Metric] = {}
        for page in pages:
            for family in text_string_to_metric_families(page):
                known = self._families.setdefault(family.name, family)
                if known is not family:
                    known.samples += family.samples

    def collect(self) -> Iterable[Metric]:
        return self._families.values()


def _metrics(socket: Path) -> str:
    """Empty where there are none, such as of a container that has just ended."""
    connection = UnixConnection(socket)
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        return answer.read().decode() if answer.status == 200 else ""
    except (OSError, HTTPException):
        return ""
    finally:
        connection.close()
