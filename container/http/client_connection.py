"""What a request needs of its client's connection, if the server lends it."""

from __future__ import annotations

import select
from collections.abc import Callable, Mapping
from typing import Any

import gevent.monkey

SendChunk = Callable[[bytes], bool]
"""Sends a part of a response's body without waiting. Returns False if not all could be sent: what
is left goes before what the server sends next."""


def direct_send(environ: Mapping[str, object]) -> SendChunk | None:
    """Return how to send parts of this WSGI request's response past the server.

    The server must have sent all parts before. Returns None if it lends no such connection, or if
    the response will not be in chunks.
    """
    is_chunked = environ.get("SERVER_PROTOCOL") == "HTTP/1.1"
    return getattr(environ.get("gunicorn.socket"), "send_chunk", None) if is_chunked else None


def disconnect_check(environ: Mapping[str, object]) -> Callable[[], bool]:
    """Return a function that returns whether the client of this WSGI request has disconnected.

    The function always returns False under a server that does not put its socket into `environ`.
    """
    connection = environ.get("gunicorn.socket")
    if connection is None:
        return lambda: False
    return lambda: _has_hung_up(connection)


def _has_hung_up(connection: Any) -> bool:
    """Return whether the peer closed its end of the connection. Consumes no data.

    Peeking would not do: before a TLS client closes, it sends an encrypted notice, which is data.
    """
    try:
        # gevent's own poll would let other greenlets run first.
        poll = gevent.monkey.get_original("select", "poll")()
        poll.register(connection.fileno(), select.POLLRDHUP)
    except (OSError, ValueError):  # already closed on this side
        return True
    return bool(poll.poll(0))
