"""Whether the client of a request is still there."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from typing import Protocol

import gevent.monkey


class HasFileno(Protocol):
    """The part of a socket that is asked for here."""

    def fileno(self) -> int: ...


def disconnect_check(environ: Mapping[str, object]) -> Callable[[], bool]:
    """A function that says whether the client of this WSGI request has gone.

    Always «no» under a server that does not hand out its socket.
    """
    connection = environ.get("gunicorn.socket")
    if connection is None:
        return lambda: False
    return lambda: has_hung_up(connection)  # pyright: ignore[reportArgumentType]


def has_hung_up(connection: HasFileno) -> bool:
    """Whether the peer closed the connection, or its half of it; takes nothing out of it."""
    # gevent's own recv would wait for data even with MSG_DONTWAIT, so the plain class looks.
    plain_socket = gevent.monkey.get_original("socket", "socket")
    try:
        looking: socket.socket = plain_socket(fileno=connection.fileno())
    except (OSError, ValueError):  # closed on this side
        return True
    try:
        return looking.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        looking.detach()
