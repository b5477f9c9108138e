"""The one place where errors become HTTP."""

from __future__ import annotations

import logging

import msgspec
from flask import Flask, Response, g, request
from werkzeug.exceptions import HTTPException, NotFound, RequestEntityTooLarge

from container.generation import ClientGoneError
from core.errors import (
    EngineUnavailableError,
    GenerationError,
    LongshoreError,
    OverloadedError,
    RequestError,
)

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1
_CLIENT_CLOSED_REQUEST = 499  # nginx's number; nobody reads the answer, but logs and tests do


def register_failures(app: Flask) -> None:
    """Has the app answer every error as JSON."""
    app.register_error_handler(LongshoreError, _on_purpose)
    app.register_error_handler(HTTPException, _by_http)
    app.register_error_handler(Exception, _by_accident)


def failure(code: int, message: str, field: str | None = None) -> Response:
    """The JSON answer to a request that failed."""
    body: dict[str, object] = {"error": message, "code": code}
    if field is not None:
        body["field"] = field
    response = Response(msgspec.json.encode(body), code, mimetype="application/json")
    if code == 503:
        response.headers["Retry-After"] = str(RETRY_AFTER_S)
    return response


def _on_purpose(error: LongshoreError) -> Response:
    match error:
        case RequestError():
            return failure(400, str(error), error.field)
        case OverloadedError() | EngineUnavailableError():
            return failure(503, str(error))
        case ClientGoneError():
            return failure(_CLIENT_CLOSED_REQUEST, str(error))
        case GenerationError():
            logger.warning("request=%s event=failed reason=%r", g.request_id, str(error))
            return failure(424, str(error))
        case _:
            return _by_accident(error)


def _by_http(error: HTTPException) -> Response:
    if isinstance(error, RequestEntityTooLarge):
        return failure(413, "the body is larger than max_request_size allows")
    description = error.description or error.name
    if isinstance(error, NotFound) and error.description == NotFound.description:
        description = f"there is no {request.path}; requests go to /invocations"
    response = failure(error.code or 500, description)
    for name, value in error.get_headers():
        if name not in ("Content-Type", "Content-Length"):
            response.headers[name] = value  # such as Allow, for 405
    return response


def _by_accident(error: Exception) -> Response:
    logger.error("request=%s event=failed", g.request_id, exc_info=error)
    return failure(500, "internal error")
