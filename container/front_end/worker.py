"""gunicorn's gevent worker with the shutdown and the limits that a container needs.

gunicorn's own worker waits for idle keep-alive connections, notices SIGTERM only once a second, and
cuts off running requests without an error. This one closes idle connections at once. Shortly before
the graceful timeout ends, it makes the application fail the requests that are still running, so
that every stream gets a final record.

gunicorn's own worker also waits without limit for a client that sends or reads slowly (`arrival`
limits that), and accepts nobody once it has its maximum of connections. This one then closes the
connection that is idle for longest; if none is idle, it answers the health and refuses the rest.
"""

from __future__ import annotations

import gc
import logging
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from types import FrameType
from typing import Any, Protocol, cast

import gevent
import gevent.event
import msgspec
from gevent.pool import Pool
from gevent.server import StreamServer
from gunicorn.sock import ssl_context
from gunicorn.workers.ggevent import GeventWorker

from container.front_end.arrival import Arrival, ArrivingBody, Timeouts
from container.http.health import HEALTH_PATHS
from container.http.off_loop import SWITCH_INTERVAL_S
from container.security.tls import shake_hands
from core.errors import LongshoreError, OverloadedError
from core.processes import die_with_parent

logger = logging.getLogger(__name__)

LAST_WORDS_S = 2.0
"""Seconds before the end of the graceful timeout at which running requests are failed."""
EXTRA_CONNECTIONS = 64
"""Connections beyond the maximum that may ask for the health, or are refused."""
RETRY_AFTER_S = 1
_POLL_INTERVAL_S = 0.05


class DrainableApplication(Protocol):
    """A gunicorn application that can end its streams and fail its running requests."""

    def end_watching(self) -> None:
        """End the responses that never end by themselves."""
        ...

    @property
    def timeouts(self) -> Timeouts:
        """The time limits of connections."""
        ...

    def end_requests(self, reason: str) -> None:
        """Fail every running request with an error that gives the reason."""
        ...


class DrainingWorker(GeventWorker):
    """A worker that finishes its requests on SIGTERM but does not wait for idle connections."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._idle: dict[object, gevent.Timeout] = {}
        """By greenlet, the connections that wait for a request; longest idle first."""
        self._open: dict[object, Arrival] = {}
        """All connections, by greenlet."""
        self._ending: set[object] = set()
        """The greenlets of those that are being closed for a new one."""
        self._stop_requested = gevent.event.Event()

    def init_process(self) -> None:
        """Run the worker until it exits. Called after the fork."""
        # gunicorn installs its own handler much later; until then a SIGTERM would be lost.
        signal.signal(signal.SIGTERM, self.handle_exit)
        die_with_parent()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        super().init_process()

    @contextmanager
    def timeout_ctx(self) -> Generator[None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Limit the time for which a connection waits for its next request."""
        greenlet = gevent.getcurrent()
        self._open[greenlet].expect_head()
        with _silent_timeout(self.cfg.keepalive if self.alive else 0) as timeout:
            self._idle[greenlet] = timeout
            try:
                yield
            finally:
                del self._idle[greenlet]

    def handle(self, listener: Any, client: Any, addr: Any) -> None:
        """Serve a connection until it is closed."""
        greenlet = gevent.getcurrent()
        connection = Arrival(client, cast(DrainableApplication, self.app).timeouts)
        self._open[greenlet] = connection
        try:
            if self._num_excess > 0:
                self._end_idle_connections(self._num_excess)
            super().handle(listener, cast(Any, connection), addr)
        finally:
            del self._open[greenlet]
            self._ending.discard(greenlet)

    @property
    def _num_excess(self) -> int:
        """Connections beyond the maximum."""
        return len(self._open) - len(self._ending) - self.worker_connections

    def handle_request(self, listener_name: Any, req: Any, sock: Any, addr: Any) -> bool:
        """Answer one request. Raises StopIteration to close the connection."""
        if self._num_excess > 0 and req.path not in HEALTH_PATHS:
            error = OverloadedError(
                f"{self.worker_connections} connections are open (option.max_connections)"
            )
            self.handle_error(req, sock, addr, error)
            raise StopIteration
        sock.expect_body()
        req.body = body = ArrivingBody.of(req)
        is_read = False
        try:
            super().handle_request(listener_name, req, sock, addr)
        finally:
            is_read = sock.drain(body)
        if not is_read:
            sock.linger()
            raise StopIteration
        return True

    def handle_error(self, req: Any, client: Any, addr: Any, exc: BaseException) -> None:
        """Answer a request that does not reach the application."""
        if not isinstance(exc, LongshoreError):
            super().handle_error(req, client, addr, exc)
            return
        logger.warning("event=refused status=%d reason=%r", exc.status, str(exc))
        with suppress(OSError):
            client.sendall(_refusal(exc))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle SIGTERM."""
        self.alive = False
        self._stop_requested.set()

    def run(self) -> None:
        """Serve until SIGTERM, then until all requests have ended or the graceful timeout ends."""
        gc.collect()
        gc.freeze()  # the application stays: large bodies should not make the collector scan it
        servers = [self._server(listener) for listener in self.sockets]
        for server in servers:
            server.start()
        while self.alive:
            self.notify()
            self._stop_requested.wait(1.0)
        app = cast(DrainableApplication, self.app)
        for server in servers:
            server.close()
        app.end_watching()
        self._end_idle_connections()
        if not self._drained(servers, self.cfg.graceful_timeout - LAST_WORDS_S):
            app.end_requests("the server is stopping")
            self._drained(servers, LAST_WORDS_S)
        for server in servers:
            server.stop(timeout=0)
        gc.unfreeze()  # so that Python takes the application apart in its usual order

    def _server(self, listener: Any) -> StreamServer:
        listener.setblocking(1)
        pool = Pool(self.worker_connections + EXTRA_CONNECTIONS)
        tls = ssl_context(self.cfg) if self.cfg.is_ssl else None

        def handle(client: Any, address: Any) -> None:
            connection = client if tls is None else shake_hands(client, tls)
            if connection is not None:
                self.handle(listener, connection, address)

        server = StreamServer(listener, handle=handle, spawn=pool)
        if self.cfg.workers > 1:
            server.max_accept = 1  # so that one worker does not accept all connections
        return server

    def _end_idle_connections(self, count: int | None = None) -> None:
        """Close idle connections, all or the `count` that are idle for longest.

        Raises the keep-alive timeout in each; gunicorn then closes it cleanly.
        """
        idle = [item for item in self._idle.items() if item[0] not in self._ending]
        for greenlet, timeout in idle[:count]:
            self._ending.add(greenlet)
            gevent.kill(cast("gevent.Greenlet[..., Any]", greenlet), timeout)

    def _drained(self, servers: list[StreamServer], within_s: float) -> bool:
        """Wait until no connection is open. Returns False if one is still open after `within_s`."""
        with _silent_timeout(within_s):
            while any(server.pool for server in servers):
                self.notify()
                gevent.sleep(_POLL_INTERVAL_S)
            return True
        return False


def _refusal(error: LongshoreError) -> bytes:
    """Return the response to a request that does not reach the application."""
    body = msgspec.json.encode({"error": str(error), "code": error.status})
    status = HTTPStatus(error.status)
    lines = [
        f"HTTP/1.1 {status} {status.phrase}",
        "Connection: close",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    ]
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        lines.append(f"Retry-After: {RETRY_AFTER_S}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def _silent_timeout(seconds: float) -> gevent.Timeout:
    """Return a timeout that ends its `with` block without an exception."""
    return gevent.Timeout(seconds, False)  # pyright: ignore[reportArgumentType]
