"""Requests to the user's own handler: bodies and responses of any type pass through unchanged."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

import msgspec
from flask import Response

from container.http.deadline import ClientGoneError
from container.http.request_context import RequestContext
from container.http.route import Invocation
from container.http.service import Service
from core.protocol.messages import Performed

_TRANSPORT_HEADERS = ("connection", "content-length", "date", "server", "transfer-encoding")
"""Headers about the connection. The server sets them, so the handler's own are dropped."""


def read(service: Service, context: RequestContext) -> Mapping[str, object]:
    """Return no fields, since only the handler knows the format of the body."""
    return {}


def answer(service: Service, context: RequestContext, body: Mapping[str, object]) -> Response:
    """Return the handler's response, streamed if the handler yields several parts."""
    headers = dict(context.headers.items())
    if context.accept is not None:
        headers["Accept"] = context.accept
    connection = service.client.choose(context.session)
    reply = connection.perform(context.body, headers)
    parts = service.parts_of(context, reply)
    first = next(parts)  # read before the status is sent, so that a failure can set the status
    content = first.body if first.is_last else _stream(first, parts, context)
    response = Response(content, first.code, content_type=first.content_type or None)
    response.headers.extend(_allowed_headers(first.headers))
    response.call_on_close(parts.close)
    return response


def _stream(
    first: Performed, others: Iterable[Performed], context: RequestContext
) -> Iterator[bytes]:
    """Yield the parts' bodies. A failure becomes the last line, as the status has been sent."""
    ends_line = True
    try:
        for part in chain([first], others):
            if part.body:
                yield part.body
                ends_line = part.body.endswith(b"\n")
    except (ClientGoneError, GeneratorExit):
        context.note_client_gone()
        return
    except Exception as error:
        record = msgspec.json.encode(context.describe(error).as_lmi())
        yield (b"" if ends_line else b"\n") + record + b"\n"


def _allowed_headers(headers: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, value in headers.items():
        is_valid = re.fullmatch("[A-Za-z0-9-]+", name) and re.fullmatch("[ -~]*", value)
        if is_valid and name.lower() not in _TRANSPORT_HEADERS:
            yield name, value


INVOCATION = Invocation("handler", read, answer)
