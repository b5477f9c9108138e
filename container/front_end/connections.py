"""The open connections of a process: how many there may be, and which of them wait."""

from __future__ import annotations

import logging
import resource
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any, cast

import gevent
from gevent.hub import Waiter
from gevent.pool import Pool

from container.http.health import HEALTH_PATHS
from container.security.tls import shake_hands
from core.errors import OverloadedError

logger = logging.getLogger(__name__)

KEEPALIVE_S = 75
"""Longer than the 60 s for which AWS's load balancers keep idle connections."""
EXTRA_CONNECTIONS = 64
"""Connections beyond the maximum. Their requests are refused, except those to a health path."""
OTHER_FILES = 64
"""Files that a process may need besides its connections. A worker has about 20."""


class Connections:
    """At most `maximum` connections, each served by a greenlet of its own.

    To accept one more, the connection that has been idle longest is closed. If none is idle, the
    new one may only request a health path.
    """

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum
        self._open: set[object] = set()
        """The greenlets of all connections."""
        self._idle: dict[object, gevent.Timeout] = {}
        """By greenlet, the connections that wait for a request or handshake; longest idle first."""
        self._ending: set[object] = set()
        """The greenlets of connections that are being closed to make room."""

    def pool(self) -> Pool:
        """Return a pool with room for the greenlets."""
        return Pool(self._maximum + EXTRA_CONNECTIONS)

    @contextmanager
    def open(self) -> Generator[None]:
        """Count the connection of this greenlet for as long as the block runs."""
        greenlet = gevent.getcurrent()
        self._open.add(greenlet)
        try:
            self.end_idle(max(0, self._num_excess))
            yield
        finally:
            self._open.discard(greenlet)
            self._ending.discard(greenlet)

    @contextmanager
    def idle(self, timeout_s: float | None) -> Generator[None]:
        """Count the connection of this greenlet as idle for as long as the block runs.

        The block ends early, without an exception, after `timeout_s` or to make room for another.
        """
        greenlet = gevent.getcurrent()
        with silent_timeout(timeout_s) as timeout:
            self._idle[greenlet] = timeout
            try:
                yield
            finally:
                del self._idle[greenlet]

    def shake_hands(self, client: Any, tls: Any | None) -> Any | None:
        """Return the TLS connection with a client, or the client itself without TLS.

        Returns None after closing a client that does not complete the handshake.
        """
        if tls is None:
            return client
        with self.idle(None):
            return shake_hands(client, tls)
        return None  # closed to make room

    def require_room(self, path: str) -> None:
        """Raise OverloadedError for a request on a connection beyond the maximum."""
        if self._num_excess > 0 and path not in HEALTH_PATHS:
            raise OverloadedError(f"{self._maximum} connections are open (option.max_connections)")

    def end_idle(self, count: int | None = None) -> None:
        """Close all idle connections, or the `count` that have been idle longest."""
        idle = [item for item in self._idle.items() if item[0] not in self._ending]
        for greenlet, timeout in idle[:count]:
            self._ending.add(greenlet)
            gevent.kill(cast("gevent.Greenlet[..., Any]", greenlet), timeout)

    @property
    def _num_excess(self) -> int:
        return len(self._open) - len(self._ending) - self._maximum


class Entrance:
    """Lets requests begin one after the other, and the event loop look at all sockets in between.

    If a thousand arrive at once, another connection's health check does not wait for all of them.
    """

    def __init__(self) -> None:
        self._waiting: deque[Waiter[None]] = deque()
        self._turn: Any = gevent.get_hub().loop.timer(0.0)
        """Active from the beginning of a request until the loop has looked at all sockets."""

    def enter(self) -> None:
        """Wait for this greenlet's turn."""
        if not self._turn.active:
            self._turn.start(self._let_next_in)
            return
        waiter: Waiter[None] = Waiter()
        self._waiting.append(waiter)
        try:
            waiter.get()
        except BaseException:  # such as the timeout of an idle connection
            with suppress(ValueError):
                self._waiting.remove(waiter)
            raise

    def _let_next_in(self) -> None:
        self._turn.stop()
        if self._waiting:
            self._turn.start(self._let_next_in)
            self._waiting.popleft().switch(None)


def silent_timeout(seconds: float | None) -> gevent.Timeout:
    """Return a timeout that ends its `with` block without an exception."""
    return gevent.Timeout(seconds, False)  # pyright: ignore[reportArgumentType]


def possible_connections(maximum: int, files_each: int = 1) -> int:
    """Return for how many connections this process may open files, `maximum` at most.

    Raises the limit of open files as far as it can: each connection needs `files_each` of them, and
    the usual limit is 1,024. Logs a warning if `maximum` does not fit.
    """
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    fits = max(1, (limit - OTHER_FILES) // files_each - EXTRA_CONNECTIONS)
    if fits >= maximum or limit == resource.RLIM_INFINITY:
        return maximum
    logger.warning(
        "at most %d connections instead of %d (option.max_connections), because the limit of open "
        "files is %d (ulimit -Hn)",
        fits,
        maximum,
        limit,
    )
    return fits
