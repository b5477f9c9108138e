"""Response headers that every route sets."""

from __future__ import annotations

import re
import uuid

from flask import Flask, Response, g, request

from container.http.request_context import WARNED, LoggedWarnings
from container.http.request_record import RequestRecord

CUSTOM_ATTRIBUTES = "X-Amzn-SageMaker-Custom-Attributes"


def register_headers(app: Flask) -> None:
    """Give each request an id, and add the common headers to each response."""
    app.extensions[WARNED] = LoggedWarnings()
    app.before_request(_begin)
    app.after_request(_add)


def _begin() -> None:
    """Take SageMaker's inference id as the request id if it is printable, else make a new one."""
    given = request.headers.get("X-Amzn-SageMaker-Inference-Id", "")
    g.request_id = given if re.fullmatch(r"[!-~]{1,64}", given) else uuid.uuid4().hex
    g.headers = {}
    g.body = None  # until a hook reads or replaces the body (container/hooks/)
    g.charge = _ignore
    g.api_key = ""
    g.record = RequestRecord()


def _ignore(num_tokens: int) -> None:
    """Count no tokens: the request has no API key, or its key has no limit."""


def _add(response: Response) -> Response:
    response.headers.setdefault("X-Request-Id", g.request_id)
    response.headers.update(g.headers)
    attributes = request.headers.get(CUSTOM_ATTRIBUTES, "")
    if re.fullmatch(r"[ -~]{1,1024}", attributes):  # the characters that SageMaker allows
        response.headers[CUSTOM_ATTRIBUTES] = attributes
    return response
