"""HTTP with the container of a replica, over its Unix socket."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import httpcore2

from deploy.fleet.http_message import HOP_BY_HOP_BYTES, Head, ReplicaLostError, Request, without

_ORIGIN = httpcore2.Origin(b"http", b"container", 80)
_LENGTH = frozenset((b"content-length",))


async def exchange(socket: Path, request: Request) -> AsyncGenerator[Head | bytes]:
    """Send a request; yield the response's head, then its body in pieces as they arrive.

    Each request has its own connection. Closing the generator closes the connection, which tells
    the container that the client has left. Raises ReplicaLostError if the container does not
    answer, or ends before the response is complete.
    """
    try:
        async with httpcore2.AsyncHTTPConnection(_ORIGIN, uds=str(socket)) as connection:
            response = await connection.handle_async_request(_outgoing(request))
            yield Head(response.status, without(tuple(response.headers), HOP_BY_HOP_BYTES))
            async for piece in response.aiter_stream():
                yield piece
    except (httpcore2.NetworkError, httpcore2.RemoteProtocolError) as error:
        raise ReplicaLostError(f"the container has ended: {error}") from None


async def fetch(socket: Path, request: Request) -> tuple[Head, bytes]:
    """Return the whole response. Raises ReplicaLostError as `exchange` does."""
    head, *pieces = [part async for part in exchange(socket, request)]
    assert isinstance(head, Head)
    return head, b"".join(piece for piece in pieces if isinstance(piece, bytes))


def _outgoing(request: Request) -> httpcore2.Request:
    # The body has arrived whole, whether the client sent a length or chunks.
    length = (b"content-length", str(len(request.body)).encode())
    has_host = any(name.lower() == b"host" for name, _ in request.headers)  # HTTP/1.0 needs none
    has_body = request.body or request.method not in ("GET", "HEAD", "OPTIONS")
    return httpcore2.Request(
        request.method,
        httpcore2.URL(
            scheme=_ORIGIN.scheme, host=_ORIGIN.host, port=_ORIGIN.port, target=request.target
        ),
        headers=[
            *without(request.headers, HOP_BY_HOP_BYTES | _LENGTH),
            (b"connection", b"close"),
            *([] if has_host else [(b"host", _ORIGIN.host)]),
            *([length] if has_body else []),
        ],
        content=request.body,
    )
