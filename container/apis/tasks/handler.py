"""The user's own handler: bodies of any type go to it as they are, and its answers come back so."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

import msgspec
from flask import Response, g, request

from container.apis.tasks.host import TaskHost
from container.http.failures import describe
from container.http.patience import ClientGoneError
from core.messages import Performed

_OF_THE_SERVER = ("connection", "content-length", "date", "server", "transfer-encoding")
"""Headers that say how an answer is sent, which is not the handler's to decide."""


class HandlerApi:
    """Knows nothing of what is said."""

    def __init__(self, host: TaskHost) -> None:
        self._host = host

    def read(self) -> Mapping[str, object]:
        """No fields: the handler alone knows what a body means."""
        return {}

    def answer(self, body: Mapping[str, object], accept: str | None) -> Response:
        """What the handler answers to the current request."""
        headers = dict(request.headers.items())
        if accept is not None:
            headers["Accept"] = accept
        parts = self._host.parts(self._host.data(), headers)
        first = next(parts)  # no status is sent before, so that an early failure has its own
        said = first.body if first.is_last else _stream(first, parts, g.request_id)
        response = Response(said, first.code, content_type=first.content_type or None)
        response.headers.extend(_sendable(first.headers))
        response.call_on_close(parts.close)
        return response


def _stream(first: Performed, others: Iterable[Performed], request_id: str) -> Iterator[bytes]:
    """The bodies. A failure is a line of its own, the last, since the status has been sent."""
    ends_line = True
    try:
        for part in chain([first], others):
            if part.body:
                yield part.body
                ends_line = part.body.endswith(b"\n")
    except ClientGoneError:
        return
    except Exception as error:
        record = msgspec.json.encode(describe(error, request_id).as_lmi())
        yield (b"" if ends_line else b"\n") + record + b"\n"


def _sendable(headers: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, value in headers.items():
        is_ours = name.lower() in _OF_THE_SERVER
        if not is_ours and re.fullmatch("[A-Za-z0-9-]+", name) and re.fullmatch("[ -~]*", value):
            yield name, value
