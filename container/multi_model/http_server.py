"""The HTTP server in front of several models: gevent's, with the limits of a front-end worker."""

from __future__ import annotations

import io
from socket import socket
from typing import Any, Literal, cast

from gevent.pywsgi import WSGIHandler, WSGIServer

from container.front_end.arrival import Arrival
from container.front_end.body_memory import BodyMemory
from container.front_end.connections import KEEPALIVE_S, Connections
from container.front_end.refusal import refuse
from container.launch.ports import client_address
from core.errors import LongshoreError
from core.options import Options


class HttpServer(WSGIServer):
    """Serves an application, and limits the number and the slowness of its connections."""

    def __init__(self, listener: socket, app: Any, options: Options, tls: Any | None) -> None:
        """`listener` listens, and `tls` is an SSLContext, or None for HTTP."""
        listener.setblocking(False)
        self.connections = Connections(options.max_connections)
        self.options = options
        self.bodies = BodyMemory(options.max_body_memory)
        self._tls = tls
        super().__init__(
            listener,
            app,
            spawn=self.connections.pool(),
            log=None,
            handler_class=_Handler,
            environ={
                "SERVER_NAME": "localhost",
                "wsgi.url_scheme": "http" if tls is None else "https",
            },
        )

    def handle(self, sock: Any, address: Any) -> None:
        """Serve a connection until it is closed."""
        with self.connections.open():
            connection = self.connections.shake_hands(sock, self._tls)
            if connection is not None:
                try:
                    super().handle(connection, cast(Any, client_address(address)))
                finally:
                    connection.close()


class _Handler(WSGIHandler):
    """Serves one connection, with its limits."""

    def __init__(self, client: Any, address: Any, server: HttpServer) -> None:
        self._connections = server.connections
        self._client = _Client(client, server.options, server.bodies)
        super().__init__(cast(Any, self._client), address, server)

    def get_environ(self) -> dict[str, Any]:
        """Add the client's socket, as gunicorn does; `disconnect_check` needs it."""
        return {**super().get_environ(), "gunicorn.socket": self._client}

    def handle_one_request(self) -> tuple[str, bytes] | Literal[True] | None:
        """Wait for a request and answer it. Returns None to close the connection."""
        try:
            return super().handle_one_request() if self._has_request() else None
        except LongshoreError as error:
            refuse(self._client, error)
        except ConnectionError:  # the client is gone
            pass
        return None

    def _has_request(self) -> bool:
        """Wait for the first byte of a request. Returns False if there will be none."""
        self._client.expect_head()
        with self._connections.idle(KEEPALIVE_S):
            return bool(self.rfile.peek(1))
        return False

    def handle_one_response(self) -> None:
        """Answer the request whose head has arrived."""
        self._connections.require_room((self.path or "").partition("?")[0])
        self._client.expect_body()
        try:
            super().handle_one_response()
        finally:
            self._client.release_body()

    def handle_error(self, t: Any, v: Any, tb: Any) -> None:
        """Handle an error after the response, such as a body whose rest did not arrive in time."""
        if isinstance(v, LongshoreError):
            self.close_connection = True
        else:
            super().handle_error(t, v, tb)

    def _handle_client_error(self, ex: Exception) -> Any:
        """Handle an error in a request's head. Called by gevent."""
        if isinstance(ex, LongshoreError | ConnectionError):
            raise ex
        return super()._handle_client_error(ex)  # pyright: ignore


class _Client(Arrival):
    """A client's connection, which gevent reads as a file."""

    def makefile(self, mode: str, buffering: int) -> io.BufferedReader:
        return io.BufferedReader(_Reader(self))


class _Reader(io.RawIOBase):
    def __init__(self, client: Arrival) -> None:
        self._client = client

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._client.recv(len(buffer))
        buffer[: len(data)] = data
        return len(data)
