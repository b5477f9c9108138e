"""Answers requests that do not reach the application."""

from __future__ import annotations

import logging
from contextlib import suppress
from http import HTTPStatus

import msgspec

from container.front_end.arrival import Arrival
from container.http.failures import RETRY_AFTER_S, Failure
from core.errors import LongshoreError

logger = logging.getLogger(__name__)


def refuse(connection: Arrival, error: LongshoreError) -> None:
    """Answer with the error and end the connection."""
    logger.warning("event=refused status=%d reason=%r", error.status, str(error))
    with suppress(OSError):
        connection.sendall(_response(error))
    connection.linger()


def _response(error: LongshoreError) -> bytes:
    body = msgspec.json.encode(Failure(error.status, str(error)).as_lmi())
    status = HTTPStatus(error.status)
    lines = [
        f"HTTP/1.1 {status} {status.phrase}",
        "Connection: close",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    ]
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        lines.append(f"Retry-After: {RETRY_AFTER_S}")
    return "\r\n".join([*lines, "", ""]).encode() + body
