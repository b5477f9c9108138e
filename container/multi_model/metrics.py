"""Merges the metrics of all models into one page; the label model_name tells them apart."""

from __future__ import annotations

from collections.abc import Iterable
from http.client import HTTPException
from pathlib import Path

import gevent
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from container.http.merged_metrics import MergedMetrics
from container.multi_model.model_container import UnixConnection

TIMEOUT_S = 2.0


def merge_metrics(sockets: Iterable[Path]) -> bytes:
    """Fetch the metrics of all models concurrently; leave out models that do not answer in time."""
    fetches: list[gevent.Greenlet[[], str]] = [gevent.spawn(_fetch, socket) for socket in sockets]
    gevent.joinall(fetches, TIMEOUT_S)
    gevent.killall(fetches)
    pages = [fetch.value for fetch in fetches if isinstance(fetch.value, str)]
    families = (family for page in pages for family in text_string_to_metric_families(page))
    registry = CollectorRegistry()
    registry.register(MergedMetrics(families))
    return generate_latest(registry)


def _fetch(socket: Path) -> str:
    """Return a container's metrics, or '' if it does not answer, for example because it exited."""
    connection = UnixConnection(socket)
    try:
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        return response.read().decode() if response.status == 200 else ""
    except (OSError, HTTPException):
        return ""
    finally:
        connection.close()
