"""Detects that the client of a request has disconnected."""

from __future__ import annotations

import select
from collections.abc import Callable, Mapping
from typing import Any

import gevent.monkey


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
