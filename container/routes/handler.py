"""The user's own handler: bodies of any type go to it as they are, and its answers come back so."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from flask import Response, request

from container.task_host import TaskHost

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
        answer = self._host.perform(self._host.data(), headers)
        response = Response(answer.body, answer.code, content_type=answer.content_type or None)
        response.headers.extend(_sendable(answer.headers))
        return response


def _sendable(headers: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, value in headers.items():
        is_ours = name.lower() in _OF_THE_SERVER
        if not is_ours and re.fullmatch("[A-Za-z0-9-]+", name) and re.fullmatch("[ -~]*", value):
            yield name, value
