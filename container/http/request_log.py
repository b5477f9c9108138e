"""One log line for each request, written when its response has been sent (option.log_requests)."""

from __future__ import annotations

import logging

from flask import Flask, Response, g, request

from container.http.health import HEALTH_PATHS
from container.http.request_context import RequestContext
from container.http.request_record import RequestRecord
from core.process.logs import log_event

logger = logging.getLogger(__name__)

MAX_BODY_CHARACTERS = 2000
MONITORING_PATHS = (*HEALTH_PATHS, "/metrics")
"""Paths that monitors request every few seconds. Such requests are neither logged nor traced."""


def register_request_log(app: Flask, *, with_bodies: bool) -> None:
    """Log every request to the app, except monitors' requests. Log its body only if asked."""

    def after(response: Response) -> Response:
        if request.path not in MONITORING_PATHS:
            context: RequestContext = g.context
            method, path = request.method, request.path
            # A streamed response is closed after its last part, or when the client is gone.
            response.call_on_close(
                lambda: _log(context, method, path, response.status_code, with_body=with_bodies)
            )
        return response

    app.after_request(after)


def _log(context: RequestContext, method: str, path: str, status: int, *, with_body: bool) -> None:
    """Write the line. Counts and times that do not apply to the request are left out."""
    record = context.record
    log_event(
        logger,
        "request",
        request=context.id,
        method=method,
        path=path,
        status=status,
        prompt_tokens=record.prompt_tokens or None,
        tokens=record.tokens if record.prompt_tokens else None,
        queue_s=_seconds(record, record.admitted),
        ttft_s=_seconds(record, record.first_token),
        total_s=_seconds(record, record.now()),
        compute_s=None if record.receipt is None else record.receipt.compute_ns / 1e9,
        kv_block_s=None if record.receipt is None else record.receipt.kv_block_ns / 1e9,
        body=_shown(context.body) if with_body else None,
    )


def _seconds(record: RequestRecord, at: float | None) -> float | None:
    return None if at is None else round(max(0.0, at - record.began), 4)


def _shown(body: bytes) -> str:
    return body[: 4 * MAX_BODY_CHARACTERS].decode("utf-8", "replace")[:MAX_BODY_CHARACTERS]
