"""One log line for each request, written when its response has been sent (option.log_requests)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from flask import Flask, Response, g, request

from container.http.health import HEALTH_PATHS
from core.logs import log_event
from core.output import Output

logger = logging.getLogger(__name__)

MAX_BODY_CHARACTERS = 2000
UNLOGGED_PATHS = (*HEALTH_PATHS, "/metrics")
"""What monitors ask for every few seconds."""


@dataclass(slots=True)
class RequestRecord:
    """What is known of a request so far. Times are seconds of the monotonic clock."""

    now: Callable[[], float] = time.monotonic
    body: bytes = b""
    """Empty if the request was refused before its body was read."""
    prompt_tokens: int = 0
    tokens: int = 0
    """Generated tokens of all answers."""
    admitted: float | None = None
    """When the engine began with the first sequence."""
    first_token: float | None = None
    began: float = field(init=False)

    def __post_init__(self) -> None:
        self.began = self.now()

    def add(self, output: Output) -> None:
        """Count the tokens of an output."""
        self.tokens += len(output.token_ids)
        if self.admitted is None:
            self.admitted = output.admitted
        if self.first_token is None and output.token_ids:
            self.first_token = self.now()

    def log(self, id: str, method: str, path: str, status: int, *, with_body: bool) -> None:
        """Write the line. Counts and times that do not apply to the request are left out."""
        log_event(
            logger,
            "request",
            request=id,
            method=method,
            path=path,
            status=status,
            prompt_tokens=self.prompt_tokens or None,
            tokens=self.tokens if self.prompt_tokens else None,
            queue_s=self._seconds(self.admitted),
            ttft_s=self._seconds(self.first_token),
            total_s=self._seconds(self.now()),
            body=_shown(self.body) if with_body else None,
        )

    def _seconds(self, at: float | None) -> float | None:
        return None if at is None else round(max(0.0, at - self.began), 4)


def register_request_log(app: Flask, *, with_bodies: bool) -> None:
    """Log every request to the app, except those of monitors, with its body only if asked."""

    def after(response: Response) -> Response:
        if request.path not in UNLOGGED_PATHS:
            record: RequestRecord = g.record
            id, method, path = g.request_id, request.method, request.path
            # A streamed response is closed after its last part, or when the client is gone.
            response.call_on_close(
                lambda: record.log(id, method, path, response.status_code, with_body=with_bodies)
            )
        return response

    app.after_request(after)


def _shown(body: bytes) -> str:
    return body[: 4 * MAX_BODY_CHARACTERS].decode("utf-8", "replace")[:MAX_BODY_CHARACTERS]
