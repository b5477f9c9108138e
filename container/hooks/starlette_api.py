"""The requests and responses of hooks: the part of Starlette's API that AWS's examples use."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Protocol, runtime_checkable
from urllib.parse import urlsplit

import msgspec
from flask import Request, Response
from werkzeug.datastructures import Headers


class Url(str):
    """An address; its path is `.path`."""

    @property
    def path(self) -> str:
        """The part behind the host, without the query."""
        return urlsplit(self).path


class HookRequest:
    """A client's request. A hook replaces the body by setting `_body`, as AWS's examples do."""

    def __init__(self, request: Request, read_body: Callable[[], bytes]) -> None:
        """`read_body` returns the body that the client has sent."""
        self._read_body = read_body
        self._body: bytes | None = None
        self.method = request.method
        self.url = Url(request.url)
        self.headers = request.headers
        self.query_params = request.args
        self.client = SimpleNamespace(host=request.remote_addr)
        self.state = SimpleNamespace()

    @property
    def known_body(self) -> bytes | None:
        """The body, if a hook has read or replaced it."""
        return self._body

    async def body(self) -> bytes:
        """Return the body. Raises what reading it raises."""
        if self._body is None:
            self._body = self._read_body()
        return self._body

    async def json(self) -> object:
        """Return the body's JSON value. Raises json.JSONDecodeError if it has none."""
        return json.loads(await self.body())


class HookResponse:
    """The response to a request. A stream has no `body`, so hooks can recognize it by `hasattr`."""

    def __init__(self, response: Response) -> None:
        self.inner = response

    @property
    def headers(self) -> Headers:
        """The headers, which may be changed."""
        return self.inner.headers

    @property
    def status_code(self) -> int:
        return self.inner.status_code

    @status_code.setter
    def status_code(self, status: int) -> None:
        self.inner.status_code = status

    @property
    def body(self) -> bytes:
        """The whole body. Raises AttributeError if the response is a stream."""
        if self.inner.is_streamed:
            raise AttributeError("a streamed response has no body")
        return self.inner.get_data()

    @body.setter
    def body(self, data: bytes) -> None:
        self.inner.set_data(data)


@runtime_checkable
class _Response(Protocol):
    """The attributes that Starlette's and FastAPI's responses share."""

    status_code: int
    body: bytes
    headers: Mapping[str, str]


def as_response(value: object) -> Response:
    """Convert the value that a hook returned to a response: JSON, unless it is a response already.

    Raises TypeError for None and for a value that JSON cannot represent.
    """
    if value is None:
        raise TypeError("returned None instead of a response")
    if isinstance(value, HookResponse):
        return value.inner
    if isinstance(value, _Response):
        return Response(value.body, value.status_code, headers=list(value.headers.items()))
    return Response(msgspec.json.encode(value) + b"\n", mimetype="application/json")
