"""Turns errors into HTTP responses."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
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

    @property
    def is_client_error(self) -> bool:
        """Whether the request, and not the server, is at fault."""
        return 400 <= self.code < 500 and self.code != GenerationError.status


ErrorBody = Callable[[Failure], dict[str, object]]
"""Returns the body of an error response in the format of one API."""
ERROR_BODY = "longshore-error-body"
"""The key in `Flask.extensions` of the function that `register_failures` gets as `error_body`."""


def register_failures(
    app: Flask,
    error_body: Callable[[Failure, str], dict[str, object]] = lambda failure, path: (
        failure.as_lmi()
    ),
    *,
    overload_status: int = OverloadedError.status,
    count_refusal: Callable[[str], object] = lambda reason: None,
) -> None:
    """Make the app answer every error with a JSON body.

    error_body: returns the body of the error response to a request with a path.
    overload_status: the status of a request that is refused because the server is busy.
    count_refusal: called with the reason of each refused request.
    """

    def handle_error(error: Exception) -> Response:
        failure = describe(error, g.context.id)
        count(failure.code)
        if isinstance(error, OverloadedError):
            failure = dataclasses.replace(failure, code=overload_status)
        g.context.record.failure = failure
        return failure_response(failure)

    def handle_http_exception(error: HTTPException) -> Response:
        count(error.code)
        return _http_exception_response(error)

    def count(status: int | None) -> None:
        if status in _REFUSALS:
            count_refusal(refusal_reason(status))

    app.extensions[ERROR_BODY] = error_body
    app.register_error_handler(HTTPException, handle_http_exception)
    app.register_error_handler(Exception, handle_error)


def refusal_reason(status: int) -> str:
    """Return the name that a refusal with this status has in the statistics."""
    return _REFUSALS[status]


def failure_response(failure: Failure) -> Response:
    """Return the JSON response for a failed request, in the format that its path calls for."""
    body = msgspec.json.encode(current_app.extensions[ERROR_BODY](failure, request.path))
    response = Response(body, failure.code, mimetype="application/json")
    if failure.code in (429, 503):
        response.headers["Retry-After"] = str(failure.retry_after_s or RETRY_AFTER_S)
    return response


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
        configured = cast(int | None, current_app.config["MAX_CONTENT_LENGTH"])
        cure = "; max_request_size sets it" if limit == configured else ""
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
