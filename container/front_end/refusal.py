"""Answers requests that do not reach the application."""

from __future__ import annotations

import logging
from contextlib import suppress
from http import HTTPStatus

import msgspec

from container.front_end.arrival import Arrival
from container.http.failures import RETRY_AFTER_S, Failure

logger = logging.getLogger(__name__)


def refuse(connection: Arrival, failure: Failure, body: object) -> None:
    """Answer with the failure and end the connection. body: of the response, in JSON types."""
    logger.warning("event=refused status=%d reason=%r", failure.code, failure.message)
    with suppress(OSError):
        connection.sendall(_response(failure, body))
    connection.linger()


def _response(failure: Failure, document: object) -> bytes:
    body = msgspec.json.encode(document)
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
