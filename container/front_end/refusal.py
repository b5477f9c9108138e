"""Answers requests that do not reach the application."""

from __future__ import annotations

import logging
from contextlib import suppress
from http import HTTPStatus

import msgspec

from container.front_end.arrival import Arrival
from container.http.failures import RETRY_AFTER_S, Failure, failure_body

logger = logging.getLogger(__name__)


def refuse(connection: Arrival, failure: Failure, path: str) -> None:
    """Answer with the failure, in the format of the path, and end the connection."""
    logger.warning("event=refused status=%d reason=%r", failure.code, failure.message)
    with suppress(OSError):
        connection.sendall(_response(failure, path))
    connection.linger()


def _response(failure: Failure, path: str) -> bytes:
    body = msgspec.json.encode(failure_body(failure, path))
    status = HTTPStatus(failure.code)
    lines = [
        f"HTTP/1.1 {status} {status.phrase}",
        "Connection: close",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    ]
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        lines.append(f"Retry-After: {RETRY_AFTER_S}")
    return "\r\n".join([*lines, "", ""]).encode() + body
