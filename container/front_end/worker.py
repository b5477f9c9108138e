"""gunicorn's gevent worker with the shutdown that a container needs.

gunicorn's own worker waits for idle keep-alive connections, notices SIGTERM only once a second, and
cuts off running requests without an error. This one closes idle connections at once. Shortly before
the graceful timeout ends, it makes the application fail the requests that are still running, so
that every stream gets a final record.
"""

from __future__ import annotations

import signal
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol, cast

import gevent
import gevent.event
from gevent.pool import Pool
from gevent.server import StreamServer
from gunicorn.workers.ggevent import GeventWorker

from core.processes import die_with_parent

LAST_WORDS_S = 2.0
"""Seconds before the end of the graceful timeout at which running requests are failed."""
_POLL_INTERVAL_S = 0.05


class DrainableApplication(Protocol):
    """A gunicorn application that can end its streams and fail its running requests."""

    def end_watching(self) -> None:
        """End the responses that never end by themselves."""
        ...

    def end_requests(self, reason: str) -> None:
        """Fail every running request with an error that gives the reason."""
        ...


class DrainingWorker(GeventWorker):
    """A worker that finishes its requests on SIGTERM but does not wait for idle connections."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._idle: dict[object, gevent.Timeout] = {}
        self._stop_requested = gevent.event.Event()

    def init_process(self) -> None:
        """Run the worker until it exits. Called after the fork."""
        # gunicorn installs its own handler much later; until then a SIGTERM would be lost.
        signal.signal(signal.SIGTERM, self.handle_exit)
        die_with_parent()
        super().init_process()

    @contextmanager
    def timeout_ctx(self) -> Generator[None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Limit the time for which a connection waits for its next request."""
        greenlet = gevent.getcurrent()
        with _silent_timeout(self.cfg.keepalive if self.alive else 0) as timeout:
            self._idle[greenlet] = timeout
            try:
                yield
            finally:
                del self._idle[greenlet]

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle SIGTERM."""
        self.alive = False
        self._stop_requested.set()

    def run(self) -> None:
        """Serve until SIGTERM, then until all requests have ended or the graceful timeout ends."""
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

    def _server(self, listener: Any) -> StreamServer:
        listener.setblocking(1)
        pool = Pool(self.worker_connections)

        def handle(client: Any, address: Any) -> None:
            self.handle(listener, client, address)

        server = StreamServer(listener, handle=handle, spawn=pool)
        if self.cfg.workers > 1:
            server.max_accept = 1  # so that one worker does not accept all connections
        return server

    def _end_idle_connections(self) -> None:
        """Raise the keep-alive timeout in each idle connection; gunicorn then closes it cleanly."""
        for greenlet, timeout in list(self._idle.items()):
            gevent.kill(cast("gevent.Greenlet[..., Any]", greenlet), timeout)

    def _drained(self, servers: list[StreamServer], within_s: float) -> bool:
        """Wait until no connection is open. Returns False if one is still open after `within_s`."""
        with _silent_timeout(within_s):
            while any(server.pool for server in servers):
                self.notify()
                gevent.sleep(_POLL_INTERVAL_S)
            return True
        return False


def _silent_timeout(seconds: float) -> gevent.Timeout:
    """Return a timeout that ends its `with` block without an exception."""
    return gevent.Timeout(seconds, False)  # pyright: ignore[reportArgumentType]
