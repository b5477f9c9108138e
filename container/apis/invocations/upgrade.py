"""The route of SageMaker's bidirectional streams, which turns its connection into a WebSocket."""

from __future__ import annotations

import base64
import binascii
from urllib.parse import urlsplit

from flask import Response, abort, after_this_request, request
from wsproto.utilities import generate_accept_token

from container.http.failures import Failure, failure_response
from container.http.route import Api, get
from container.http.service import Service
from core.errors import RequestError

PATH = "/invocations-bidirectional-stream"
_VERSION = "13"


def upgrade(service: Service) -> Response:
    """Accept an upgrade request (RFC 6455, section 4.2). Answer any other request with a 426.

    Raises RequestError if the request is malformed, and Forbidden for a page of another host.
    """
    headers = request.headers
    if (
        headers.get("Upgrade", "").lower() != "websocket"
        or "upgrade" not in headers.get("Connection", "").lower()
        or request.environ["SERVER_PROTOCOL"] != "HTTP/1.1"
    ):
        return _upgrade_required("is for WebSockets over HTTP/1.1: send 'Upgrade: websocket'")
    if headers.get("Sec-WebSocket-Version") != _VERSION:
        return _upgrade_required(f"takes 'Sec-WebSocket-Version: {_VERSION}' only")
    if request.content_length or "Transfer-Encoding" in headers:
        raise RequestError("body", "is not allowed in an upgrade request")
    _check_origin(service.options.server.cors_allowed_origin)
    accepted = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Accept": _accept_token(headers.get("Sec-WebSocket-Key", "")),
    }
    after_this_request(_mark_upgraded)
    return Response(status=101, headers=accepted)


def _check_origin(allowed_origin: str | None) -> None:
    """Refuse pages of another host, unless an option allows them.

    Browsers do not let such pages read HTTP responses, but do let them read WebSockets.
    """
    origin = request.headers.get("Origin")
    if origin is None or allowed_origin in ("*", origin):
        return
    if urlsplit(origin).hostname != urlsplit(f"//{request.host}").hostname:
        abort(403, f"pages of {origin} may not use this server (option.cors_allowed_origin)")


def _upgrade_required(reason: str) -> Response:
    response = failure_response(Failure(426, f"{PATH} {reason}"))
    response.headers.update(
        {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": _VERSION}
    )
    return response


def _accept_token(key: str) -> str:
    """Return `Sec-WebSocket-Accept` for a key. Raises RequestError if the key is not 16 bytes."""
    try:
        is_valid = len(base64.b64decode(key, validate=True)) == 16
    except (binascii.Error, ValueError):
        is_valid = False
    if not is_valid:
        raise RequestError("Sec-WebSocket-Key", "must be 16 bytes in base64")
    return generate_accept_token(key.encode()).decode()


def _mark_upgraded(response: Response) -> Response:
    """Mark the connection as a WebSocket, unless a hook has replaced the response."""
    if response.status_code == 101:
        request.environ["gunicorn.socket"].upgraded = request.environ
    return response


UPGRADE = Api(
    "SageMaker",
    (
        get(PATH, "A WebSocket whose messages are requests to /invocations.", upgrade,
            responses={101: "The connection is now a WebSocket."}, is_websocket=True),
    ),
)  # fmt: skip
