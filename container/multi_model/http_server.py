"""The HTTP server in front of several models: a front-end worker's connections in this process."""

from __future__ import annotations

import os
from dataclasses import dataclass
from socket import socket
from typing import Any

from gevent.server import StreamServer
from gunicorn.config import Config

from container.apis.table import error_body
from container.front_end.worker import HttpWorker, PropagatingLogger, http_settings
from container.http.failures import Failure
from container.launch.ports import client_address
from core.configuration.options import ServerOptions


@dataclass(frozen=True, slots=True)
class _Application:
    server: ServerOptions

    def count_refusal(self, status: int) -> None:
        """Count nothing: the models count the requests that reach them."""

    def error_body(self, failure: Failure, path: str) -> object:
        """Return the body of the answer to a request that does not reach the application."""
        return error_body(failure, path)


class HttpServer(StreamServer):
    """Serves an application, and limits the number and the slowness of its connections."""

    def __init__(self, listener: socket, app: Any, server: ServerOptions, tls: Any | None) -> None:
        """`listener` listens, and `tls` is an SSLContext, or None for HTTP."""
        listener.setblocking(False)
        self._worker = _worker(server)
        self._worker.wsgi, self._worker.tls = app, tls
        super().__init__(listener, self._serve, spawn=self._worker.connections.pool())

    def _serve(self, client: Any, address: Any) -> None:
        self._worker.handle(self, client, client_address(address))

    def getsockname(self) -> object:
        """Return the address. The worker asks for it, even when the socket is closed already."""
        return self.address


def _worker(server: ServerOptions) -> HttpWorker:
    config = Config()
    for name, value in http_settings(server).items():
        config.set(name, value)
    log = PropagatingLogger(config)
    return HttpWorker(0, os.getpid(), [], _Application(server), 0, config, log)
