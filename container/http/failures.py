"""Turns errors into HTTP responses."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import msgspec
from flask import Flask, Response, current_app, g, request
from werkzeug.exceptions import (
    HTTPException,
    MethodNotAllowed,
    NotFound,
    RequestEntityTooLarge,
)

from core.errors import (
    GenerationError,
    LongshoreError,
    OverloadedError,
    RateLimitError,
    RequestError,
)

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1
_REFUSALS = {
    400: "invalid",
    401: "unauthorized",
    404: "not_found",
    405: "method",
    408: "slow",
    409: "conflict",
    413: "too_large",
    415: "media_type",
    429: "rate_limited",
    503: "overloaded",
    507: "no_room",
}
"""Statuses of errors that refuse a request before it runs, and their names in the statistics."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request failed, before or during its response."""

    code: int
    """The HTTP status of the failure, even if the response had already begun with another."""
    message: str
    field: str | None = None
    retry_after_s: int | None = None
    """Time after which the same request may succeed, if known."""

    def as_lmi(self) -> dict[str, object]:
        """Return the body in LMI's format, plus the request field at fault."""
        body: dict[str, object] = {"error": self.message, "code": self.code}
        return body if self.field is None else {**body, "field": self.field}

    def as_openai(self) -> dict[str, object]:
        """Return the body in OpenAI's format."""
        kind = "invalid_request_error" if self._is_client_error else "server_error"
        error = {"message": self.message, "type": kind, "param": self.field, "code": self.code}
        return {"error": error}

    def as_tgi(self) -> dict[str, object]:
        """Return the body in text-generation-inference's format."""
        kind = "validation" if self._is_client_error else "generation"
        if self.code in (429, 503):
            kind = "overloaded"
        return {"error": self.message, "error_type": kind}

    @property
    def _is_client_error(self) -> bool:
        return 400 <= self.code < 500 and self.code != GenerationError.status

    def as_anthropic(self) -> dict[str, object]:
        """Return the body in Anthropic's format, which is also the last event of a stream."""
        default = "invalid_request_error" if self._is_client_error else "api_error"
        kind = _ANTHROPIC_KINDS.get(self.code, default)
        return {"type": "error", "error": {"type": kind, "message": self.message}}


_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Anthropic's types of errors by status; its own status for an overload is 529."""

FORMATS: Sequence[tuple[tuple[str, ...], Callable[[Failure], dict[str, object]]]] = (
    (("/v1/messages", "/openai/v1/messages"), Failure.as_anthropic),
    (("/v1/", "/openai/v1/", "/tokenize", "/detokenize"), Failure.as_openai),
    (("/generate",), Failure.as_tgi),
)
"""Path prefixes, and the format in which their clients expect errors. The first match counts. Other
paths use LMI's format."""


def register_failures(
    app: Flask,
    *,
    overload_status: int = OverloadedError.status,
    count_refusal: Callable[[str], object] = lambda reason: None,
) -> None:
    """Make the app answer every error with a JSON body.

    overload_status: the status of a request that is refused because the server is busy.
    count_refusal: called with the reason of each refused request.
    """

    def handle_error(error: Exception) -> Response:
        failure = describe(error, g.request_id)
        count(failure.code)
        if isinstance(error, OverloadedError):
            failure = dataclasses.replace(failure, code=overload_status)
        g.record.failure = failure
        return failure_response(failure)

    def handle_http_exception(error: HTTPException) -> Response:
        count(error.code)
        return _http_exception_response(error)

    def count(status: int | None) -> None:
        if status in _REFUSALS:
            count_refusal(refusal_reason(status))

    app.register_error_handler(HTTPException, handle_http_exception)
    app.register_error_handler(Exception, handle_error)


def refusal_reason(status: int) -> str:
    """Return the name in the statistics of a refusal with this status."""
    return _REFUSALS[status]


def failure_response(failure: Failure) -> Response:
    """Return the JSON response for a failed request, in the format that its path calls for."""
    body = msgspec.json.encode(failure_body(failure, request.path))
    response = Response(body, failure.code, mimetype="application/json")
    if failure.code in (429, 503):
        response.headers["Retry-After"] = str(failure.retry_after_s or RETRY_AFTER_S)
    return response


def failure_body(failure: Failure, path: str) -> dict[str, object]:
    """Return the body for a failed request to this path."""
    formats = (write for prefixes, write in FORMATS if path.startswith(prefixes))
    return next(formats, Failure.as_lmi)(failure)


def describe(error: Exception, request_id: str) -> Failure:
    """Return the failure to report to the client. Logs internal errors and failed generations."""
    if not isinstance(error, LongshoreError) or error.status == LongshoreError.status:
        logger.error("request=%s event=failed", request_id, exc_info=error)
        return Failure(LongshoreError.status, "internal error")
    if isinstance(error, GenerationError):
        logger.warning("request=%s event=failed reason=%r", request_id, str(error))
    field = error.field if isinstance(error, RequestError) else None
    retry_after_s = error.retry_after_s if isinstance(error, RateLimitError) else None
    return Failure(error.status, str(error), field, retry_after_s)


def _http_exception_response(error: HTTPException) -> Response:
    if isinstance(error, RequestEntityTooLarge):
        limit = request.max_content_length
        set_by_option = cast(int | None, current_app.config["MAX_CONTENT_LENGTH"])
        cure = "; max_request_size sets it" if limit == set_by_option else ""
        return failure_response(Failure(413, f"the body exceeds the limit of {limit} bytes{cure}"))
    description = error.description or error.name
    if isinstance(error, NotFound) and error.description == NotFound.description:
        description = f"no such path: {request.path}; send requests to /invocations"
    if isinstance(error, MethodNotAllowed) and error.description == MethodNotAllowed.description:
        methods = sorted({*(error.valid_methods or ())} - {"HEAD", "OPTIONS"})
        description = f"{request.method} is not allowed here; use {' or '.join(methods)}"
    response = failure_response(Failure(error.code or 500, description))
    for name, value in error.get_headers():
        if name not in ("Content-Type", "Content-Length"):
            response.headers[name] = value  # such as Allow for status 405
    return response
