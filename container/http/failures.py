"""The one place where errors become HTTP."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import msgspec
from flask import Flask, Response, g, request
from werkzeug.exceptions import HTTPException, NotFound, RequestEntityTooLarge

from container.http.patience import ClientGoneError
from core.errors import (
    ConflictError,
    EngineUnavailableError,
    GenerationError,
    LongshoreError,
    NoRoomError,
    NotFoundError,
    OverloadedError,
    RequestError,
)

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1
OPENAI_PATHS = ("/v1/", "/tokenize", "/detokenize")
"""Where clients expect errors in OpenAI's shape; elsewhere they have LMI's."""
_GENERATION_FAILED = 424  # LMI's number
_CLIENT_CLOSED_REQUEST = 499  # nginx's number; nobody reads the answer, but logs and tests do


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request has no answer, or no whole one."""

    code: int
    """The HTTP status, or what it would have been."""
    message: str
    field: str | None = None

    def as_lmi(self) -> dict[str, object]:
        """As LMI writes it, with the field beside."""
        body: dict[str, object] = {"error": self.message, "code": self.code}
        return body if self.field is None else {**body, "field": self.field}

    def as_openai(self) -> dict[str, object]:
        """As OpenAI's clients read it."""
        is_theirs = 400 <= self.code < 500 and self.code != _GENERATION_FAILED
        kind = "invalid_request_error" if is_theirs else "server_error"
        error = {"message": self.message, "type": kind, "param": self.field, "code": self.code}
        return {"error": error}


def register_failures(app: Flask) -> None:
    """Has the app answer every error as JSON."""
    app.register_error_handler(HTTPException, _by_http)
    app.register_error_handler(Exception, _by_error)


def failure_response(failure: Failure) -> Response:
    """The JSON answer to a request that failed, in the shape of its path."""
    is_openai = request.path.startswith(OPENAI_PATHS)
    body = failure.as_openai() if is_openai else failure.as_lmi()
    response = Response(msgspec.json.encode(body), failure.code, mimetype="application/json")
    if failure.code == 503:
        response.headers["Retry-After"] = str(RETRY_AFTER_S)
    return response


def describe(error: Exception, request_id: str) -> Failure:
    """What the client is told of an error; what is not the client's doing is logged."""
    match error:
        case RequestError():
            return Failure(400, str(error), error.field)
        case NotFoundError():
            return Failure(404, str(error))
        case ConflictError():
            return Failure(409, str(error))
        case NoRoomError():
            return Failure(507, str(error))
        case OverloadedError() | EngineUnavailableError():
            return Failure(503, str(error))
        case ClientGoneError():
            return Failure(_CLIENT_CLOSED_REQUEST, str(error))
        case GenerationError():
            logger.warning("request=%s event=failed reason=%r", request_id, str(error))
            return Failure(_GENERATION_FAILED, str(error))
        case LongshoreError() | Exception():
            logger.error("request=%s event=failed", request_id, exc_info=error)
            return Failure(500, "internal error")


def _by_error(error: Exception) -> Response:
    return failure_response(describe(error, g.request_id))


def _by_http(error: HTTPException) -> Response:
    if isinstance(error, RequestEntityTooLarge):
        return failure_response(Failure(413, "the body is larger than max_request_size allows"))
    description = error.description or error.name
    if isinstance(error, NotFound) and error.description == NotFound.description:
        description = f"there is no {request.path}; requests go to /invocations"
    response = failure_response(Failure(error.code or 500, description))
    for name, value in error.get_headers():
        if name not in ("Content-Type", "Content-Length"):
            response.headers[name] = value  # such as Allow, for 405
    return response
