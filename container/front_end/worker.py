"""gunicorn's gevent worker with the shutdown and the limits that a container needs.

gunicorn's own worker waits for idle keep-alive connections, notices SIGTERM only once a second, and
cuts off running requests without an error. This one closes idle connections at once. Shortly before
the graceful timeout ends, it makes the application fail the requests that are still running, so
that every stream gets a final record.

gunicorn's own worker also waits without limit for a client that sends or reads slowly; `arrival`
limits the time. With the maximum of connections open, gunicorn's worker accepts no client;
`connections` makes room.
"""

from __future__ import annotations

import gc
import signal
import sys
from contextlib import AbstractContextManager
from functools import partial
from types import FrameType
from typing import Any, Protocol, cast

import gevent
import gevent.event
from gevent.server import StreamServer
from gevent.ssl import SSLContext
from gunicorn.http.errors import ParseException
from gunicorn.sock import ssl_context
from gunicorn.workers.ggevent import GeventWorker

from container.front_end.arrival import Arrival, ArrivingBody
from container.front_end.body_memory import BodyMemory
from container.front_end.connections import Connections, silent_timeout
from container.front_end.refusal import refuse
from container.front_end.web_socket import WebSocket
from container.http.off_loop import SWITCH_INTERVAL_S
from container.launch.ports import client_address
from container.launch.stop_times import FAILED_REQUESTS_S
from core.errors import LongshoreError, RequestError
from core.options import Options
from core.processes import die_with_parent

_POLL_INTERVAL_S = 0.05


class DrainableApplication(Protocol):
    """A gunicorn application that can end its streams and fail its running requests."""

    def end_watching(self) -> None:
        """End the responses that never end by themselves."""
        ...

    @property
    def options(self) -> Options:
        """The options of the server, such as the limits of connections."""
        ...

    def count_refusal(self, status: int) -> None:
        """Count a request that is refused before it reaches the application."""
        ...

    def end_requests(self, reason: str) -> None:
        """Fail every running request with an error that gives the reason."""
        ...

    def end_tracing(self) -> None:
        """Send the spans of the last requests."""
        ...


class DrainingWorker(GeventWorker):
    """A worker that finishes its requests on SIGTERM but does not wait for idle connections."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._application = cast(DrainableApplication, self.app)
        self._connections = Connections(self.worker_connections)
        self._bodies = BodyMemory(self._application.options.max_body_memory)
        self._tls: SSLContext | None = None
        self._stop_requested = gevent.event.Event()

    def init_process(self) -> None:
        """Run the worker until it exits. Called after the fork."""
        # gunicorn installs its own handler much later; until then a SIGTERM would be lost.
        signal.signal(signal.SIGTERM, self.handle_exit)
        die_with_parent(self.ppid)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        super().init_process()

    def timeout_ctx(self) -> AbstractContextManager[None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Limit the time for which a connection waits for its next request."""
        return self._connections.idle(self.cfg.keepalive if self.alive else 0)

    def handle(self, listener: Any, client: Any, addr: Any) -> None:
        """Serve a connection until it is closed."""
        with self._connections.open():
            connection = self._connections.shake_hands(client, self._tls)
            if connection is not None:
                arrival = Arrival(connection, self._application.options, self._bodies)
                super().handle(listener, cast(Any, arrival), cast(Any, client_address(addr)))

    def handle_request(self, listener_name: Any, req: Any, sock: Any, addr: Any) -> bool:
        """Answer one request. Raises StopIteration to close the connection."""
        self._connections.require_room(req.path)
        sock.expect_body()
        req.body = body = ArrivingBody.of(req)
        closes = False
        try:
            super().handle_request(listener_name, req, sock, addr)
        except StopIteration:
            closes = True
        finally:
            sock.release_body()
        if sock.upgraded is not None:
            early, app = req.unreader.take_buffered(), self._application
            WebSocket(sock, self.wsgi, app, self._connections, self._is_alive, early).serve()
        if not sock.drain(body):
            sock.linger()
            closes = True
        if closes:
            raise StopIteration
        sock.expect_head()
        return True

    def handle_error(self, req: Any, client: Any, addr: Any, exc: BaseException) -> None:
        """Answer a request that does not reach the application."""
        if isinstance(exc, LongshoreError):
            self._application.count_refusal(exc.status)
            refuse(client, exc)
        else:
            if isinstance(exc, ParseException):
                self._application.count_refusal(RequestError.status)
            super().handle_error(req, client, addr, exc)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle SIGTERM."""
        self.alive = False
        self._stop_requested.set()

    def run(self) -> None:
        """Serve until SIGTERM, then until all requests have ended or the graceful timeout ends."""
        gc.collect()
        gc.freeze()  # so that the collector does not scan the application for each large body
        self._tls = ssl_context(self.cfg) if self.cfg.is_ssl else None
        servers = [self._server(listener) for listener in self.sockets]
        for server in servers:
            server.start()
        while self.alive:
            self.notify()
            self._stop_requested.wait(1.0)
        app = self._application
        for server in servers:
            server.close()
        app.end_watching()
        self._connections.end_idle()
        if not self._drained(servers, self.cfg.graceful_timeout - FAILED_REQUESTS_S):
            app.end_requests("the server is stopping")
            self._drained(servers, FAILED_REQUESTS_S)
        for server in servers:
            server.stop(timeout=0)
        app.end_tracing()
        gc.unfreeze()  # so that Python frees the application in its usual order

    def _is_alive(self) -> bool:
        return self.alive

    def _server(self, listener: Any) -> StreamServer:
        listener.setblocking(1)
        handle = partial(self.handle, listener)
        server = StreamServer(listener, handle=handle, spawn=self._connections.pool())
        if self.cfg.workers > 1:
            server.max_accept = 1  # so that one worker does not accept all connections
        return server

    def _drained(self, servers: list[StreamServer], within_s: float) -> bool:
        """Wait until no connection is open. Returns False if one is still open after `within_s`."""
        with silent_timeout(within_s):
            while any(server.pool for server in servers):
                self.notify()
                gevent.sleep(_POLL_INTERVAL_S)
            return True
        return False
