"""gunicorn's gevent worker, taught to stop as a container must.

gunicorn's own waits for idle keep-alive connections, looks only once a second, and cuts running
requests off without a word. This one ends idle connections at once, and shortly before the time
is up has the application end what still runs, so that every stream gets its last line.
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
"""Seconds before the end of the graceful time in which running requests are told of it."""
_TICK_S = 0.05


class EndsRequests(Protocol):
    """What the worker asks of the gunicorn application it runs."""

    def end_requests(self, reason: str) -> None:
        """Ends every running request with an error that says why."""
        ...


class DrainingWorker(GeventWorker):
    """A worker whose idle connections never delay its end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._idle: dict[object, gevent.Timeout] = {}
        self._stop_asked = gevent.event.Event()

    def init_process(self) -> None:
        """Runs the worker; called after the fork, and returns at the end."""
        # Until gunicorn installs its handlers, much later, the inherited ones would lose a SIGTERM.
        signal.signal(signal.SIGTERM, self.handle_exit)
        die_with_parent()
        super().init_process()

    @contextmanager
    def timeout_ctx(self) -> Generator[None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The time in which a connection waits for its next request."""
        greenlet = gevent.getcurrent()
        with _silent_timeout(self.cfg.keepalive if self.alive else 0) as timeout:
            self._idle[greenlet] = timeout
            try:
                yield
            finally:
                del self._idle[greenlet]

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM."""
        self.alive = False
        self._stop_asked.set()

    def run(self) -> None:
        """Serves until SIGTERM, and then for as long as requests run and time allows."""
        servers = [self._server(each) for each in self.sockets]
        for server in servers:
            server.start()
        while self.alive:
            self.notify()
            self._stop_asked.wait(1.0)
        for server in servers:
            server.close()
        self._end_idle_connections()
        if not self._drained(servers, self.cfg.graceful_timeout - LAST_WORDS_S):
            cast(EndsRequests, self.app).end_requests("the server is stopping")
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
            server.max_accept = 1  # one at a time, so that no worker takes them all
        return server

    def _end_idle_connections(self) -> None:
        """As if their keep-alive time were over, which gunicorn takes as a regular end."""
        for greenlet, timeout in list(self._idle.items()):
            gevent.kill(cast("gevent.Greenlet[..., Any]", greenlet), timeout)

    def _drained(self, servers: list[StreamServer], within_s: float) -> bool:
        """Waits until no connection is open; False where there still are some."""
        with _silent_timeout(within_s):
            while any(server.pool for server in servers):
                self.notify()
                gevent.sleep(_TICK_S)
            return True
        return False


def _silent_timeout(seconds: float) -> gevent.Timeout:
    """A timeout that ends its `with` block and is not raised any further."""
    return gevent.Timeout(seconds, False)  # pyright: ignore[reportArgumentType]
