"""Response headers that every route sets."""

from __future__ import annotations

import re
import uuid

from flask import Flask, Response, g, request
from werkzeug.datastructures import Headers

from container.http.client_connection import direct_send, disconnect_check
from container.http.request_context import LoggedWarnings, RequestContext

CUSTOM_ATTRIBUTES = "X-Amzn-SageMaker-Custom-Attributes"


def register_headers(app: Flask) -> None:
    """Give each request its context, and add the common headers to each response."""
    warned = LoggedWarnings()

    def begin() -> None:
        g.context = RequestContext(
            _request_id(request.headers),
            request.headers,
            request.mimetype,
            disconnect_check(request.environ),
            warned.add,
            direct_send(request.environ),
        )

    app.before_request(begin)
    app.after_request(_add)


def _request_id(headers: Headers) -> str:
    """Return SageMaker's inference id if it is printable, else a new id."""
    given = headers.get("X-Amzn-SageMaker-Inference-Id", "")
    return given if re.fullmatch(r"[!-~]{1,64}", given) else uuid.uuid4().hex


def _add(response: Response) -> Response:
    response.headers.setdefault("X-Request-Id", g.context.id)
    response.headers.update(g.context.response_headers)
    attributes = request.headers.get(CUSTOM_ATTRIBUTES, "")
    if re.fullmatch(r"[ -~]{1,1024}", attributes):  # the characters that SageMaker allows
        response.headers[CUSTOM_ATTRIBUTES] = attributes
    return response
