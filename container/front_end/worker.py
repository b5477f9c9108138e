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
import logging
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from ssl import SSLError
from types import FrameType
from typing import Any, Protocol, cast

import gevent
import gevent.event
from gevent.server import StreamServer
from gevent.ssl import SSLContext
from gunicorn.config import Config
from gunicorn.glogging import Logger
from gunicorn.http.errors import (
    ExpectationFailed,
    LimitRequestHeaders,
    LimitRequestLine,
    ParseException,
)
from gunicorn.http.message import Request
from gunicorn.sock import ssl_context
from gunicorn.workers.ggevent import GeventWorker

from container.front_end.arrival import Arrival, ArrivingBody, Outbox
from container.front_end.body_memory import BodyMemory
from container.front_end.connections import KEEPALIVE_S, Connections, Entrance, silent_timeout
from container.front_end.core_use import CoreUse
from container.front_end.refusal import refuse
from container.front_end.web_socket import WebSocket
from container.http.failures import Failure
from container.http.off_loop import SWITCH_INTERVAL_S
from container.launch.ports import client_address
from container.launch.stop_times import FAILED_REQUESTS_S
from core.configuration.limits import HEADER_BYTES, HEADERS, REQUEST_LINE
from core.configuration.options import ServerOptions
from core.errors import LongshoreError, RequestError
from core.process.processes import die_with_parent

logger = logging.getLogger(__name__)

_POLL_INTERVAL_S = 0.05


class HttpApplication(Protocol):
    """What a worker needs of a gunicorn application."""

    @property
    def server(self) -> ServerOptions:
        """The options of the server, such as the limits of connections."""
        ...

    def count_refusal(self, status: int) -> None:
        """Count a request that is refused before it reaches the application."""
        ...

    def error_body(self, failure: Failure, path: str) -> object:
        """Return the body of the answer to such a request, in JSON types."""
        ...


class DrainableApplication(HttpApplication, Protocol):
    """A gunicorn application that can end its streams and fail its running requests."""

    def end_watching(self) -> None:
        """End the responses that never end by themselves."""
        ...

    def end_requests(self, reason: str) -> None:
        """Fail every running request with an error that gives the reason."""
        ...

    def end_tracing(self) -> None:
        """Send the spans of the last requests."""
        ...


_STATUSES: Mapping[type[Exception], int] = {
    LimitRequestLine: 414,
    ExpectationFailed: 417,
    LimitRequestHeaders: 431,
}
"""Statuses of what gunicorn's parser refuses. For all else it is 400."""


def _failure(error: BaseException, *, is_parsed: bool) -> Failure:
    """Return the failure to answer with. is_parsed: the head of the request has been parsed."""
    if isinstance(error, LongshoreError):
        return Failure(error.status, str(error))
    if isinstance(error, ParseException) and not is_parsed:
        status = next((code for kind, code in _STATUSES.items() if isinstance(error, kind)), 400)
        return Failure(status, str(error))
    logger.error("event=failed", exc_info=error)
    return Failure(LongshoreError.status, "internal error")


def _require_plain_body(request: Request) -> None:
    """Raise RequestError if the body has a coding other than chunks, which nothing here decodes."""
    for name, value in request.headers:
        if name == "TRANSFER-ENCODING" and value.lower() != "chunked":
            raise RequestError(name, f"{value!r} is not supported; send `chunked` or a length")


class PropagatingLogger(Logger):
    """Passes gunicorn's own messages on to this process's log."""

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        self.error_log.propagate = True


def http_settings(server: ServerOptions, *, is_tls: bool = True) -> dict[str, Any]:
    """Return gunicorn's settings for connections and logs, where they differ from its defaults.

    is_tls: use the options' certificate, if there is one.
    """
    return {
        "certfile": server.ssl_certfile if is_tls else None,
        "keyfile": server.ssl_keyfile if is_tls else None,
        "worker_connections": server.max_connections,
        "limit_request_line": REQUEST_LINE.maximum,
        "limit_request_fields": HEADERS.maximum,
        "limit_request_field_size": HEADER_BYTES.maximum,
        # By default, a client on this machine may change paths with a header SCRIPT_NAME.
        "forwarder_headers": "",
        "keepalive": KEEPALIVE_S,
        "accesslog": None,
        "errorlog": None,
        "loglevel": "warning",
        "logger_class": PropagatingLogger,
    }


class HttpWorker(GeventWorker):
    """Serves connections. `wsgi` is the application, and `tls` the context for HTTPS, if any."""

    tls: SSLContext | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._application = cast(HttpApplication, self.app)
        self._bodies = BodyMemory(self._application.server.max_body_memory)
        self.connections = Connections(self.worker_connections)
        self._outbox = Outbox()
        self._entrance: Entrance | None = None
        """Made after the fork, by the first connection, because it belongs to the event loop."""

    def timeout_ctx(self) -> AbstractContextManager[None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Limit the time for which a connection waits for its next request."""
        return self.connections.idle(self.cfg.keepalive if self.alive else 0)

    def handle(self, listener: Any, client: Any, addr: Any) -> None:
        with self.connections.open():
            connection = self.connections.shake_hands(client, self.tls)
            if connection is not None:
                self._entrance = self._entrance or Entrance()
                arrival = Arrival(
                    connection,
                    self._application.server,
                    self._bodies,
                    enter=self._entrance.enter,
                    outbox=self._outbox,
                )
                super().handle(listener, cast(Any, arrival), cast(Any, client_address(addr)))

    def handle_request(self, listener_name: Any, req: Any, sock: Any, addr: Any) -> bool:
        """Answer one request. Raises StopIteration to close the connection."""
        self.connections.require_room(req.path)
        _require_plain_body(req)
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
            WebSocket(
                sock,
                self.wsgi,
                self.connections,
                self._application.server,
                self._application.count_refusal,
                self._is_alive,
                early=req.unreader.take_buffered(),
            ).serve()
        if not sock.drain(body):
            sock.linger()
            closes = True
        if closes:
            raise StopIteration
        sock.expect_head()
        return True

    def handle_error(self, req: Any, client: Any, addr: Any, exc: BaseException) -> None:
        """Answer a request that does not reach the application."""
        if isinstance(exc, SSLError):
            return  # nothing can be sent any more
        request = req or getattr(exc, "req", None)
        failure = _failure(exc, is_parsed=req is not None)
        if failure.code != LongshoreError.status:
            is_ours = isinstance(exc, LongshoreError)
            self._application.count_refusal(failure.code if is_ours else RequestError.status)
        path = getattr(request, "path", None) or ""
        refuse(client, failure, self._application.error_body(failure, path))

    def _is_alive(self) -> bool:
        return self.alive


class DrainingWorker(HttpWorker):
    """A worker that finishes its requests on SIGTERM but does not wait for idle connections."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stop_requested = gevent.event.Event()

    def init_process(self) -> None:
        """Run the worker until it exits. Called after the fork."""
        # gunicorn installs its own handler much later; until then a SIGTERM would be lost.
        signal.signal(signal.SIGTERM, self.handle_exit)
        die_with_parent(self.ppid)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        # gunicorn looks its settings up again for each request.
        vars(self.cfg).update({name: each.get() for name, each in self.cfg.settings.items()})
        super().init_process()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle SIGTERM."""
        self.alive = False
        self._stop_requested.set()

    def run(self) -> None:
        """Serve until SIGTERM, then until all requests have ended or the graceful timeout ends."""
        gc.collect()
        gc.freeze()  # so that the collector does not scan the application for each large body
        self.tls = ssl_context(self.cfg) if self.cfg.is_ssl else None
        servers = [self._server(listener) for listener in self.sockets]
        for server in servers:
            server.start()
        core_use = CoreUse()
        while self.alive:
            self.notify()
            if core_use.is_high():
                os.kill(self.ppid, signal.SIGTTIN)  # asks for another worker
            self._stop_requested.wait(1.0)
        app = cast(DrainableApplication, self.app)
        for server in servers:
            server.close()
        app.end_watching()
        self.connections.end_idle()
        if not self._drained(servers, self.cfg.graceful_timeout - FAILED_REQUESTS_S):
            app.end_requests("the server is stopping")
            self._drained(servers, FAILED_REQUESTS_S)
        for server in servers:
            server.stop(timeout=0)
        app.end_tracing()
        gc.unfreeze()  # so that Python frees the application in its usual order

    def _server(self, listener: Any) -> StreamServer:
        listener.setblocking(1)
        handle = partial(self.handle, listener)
        server = StreamServer(listener, handle=handle, spawn=self.connections.pool())
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
