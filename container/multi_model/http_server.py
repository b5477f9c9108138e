"""The HTTP server in front of several models: a front-end worker's connections in this process."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from gevent.server import StreamServer
from gunicorn.config import Config

from container.front_end.worker import HttpWorker, PropagatingLogger, http_settings
from core.configuration.options import Options

_BACKLOG = 2048


@dataclass(frozen=True, slots=True)
class _Application:
    options: Options

    def count_refusal(self, status: int) -> None:
        """Count nothing: the models count the requests that reach them."""


class HttpServer(StreamServer):
    """Serves an application, and limits the number and the slowness of its connections."""

    def __init__(self, port: int, app: Any, options: Options, tls: Any | None) -> None:
        """`tls` is an SSLContext, or None for HTTP."""
        self._worker = _worker(options)
        self._worker.wsgi, self._worker.tls = app, tls
        connections = self._worker.connections.pool()
        super().__init__(("0.0.0.0", port), self._serve, backlog=_BACKLOG, spawn=connections)

    def _serve(self, client: Any, address: Any) -> None:
        """Serve a connection until it is closed."""
        self._worker.handle(self, client, address)

    def getsockname(self) -> object:
        """Return the address. The worker asks for it, even when the socket is closed already."""
        return self.address


def _worker(options: Options) -> HttpWorker:
    config = Config()
    for name, value in http_settings(options).items():
        config.set(name, value)
    log = PropagatingLogger(config)
    return HttpWorker(0, os.getpid(), [], _Application(options), 0, config, log)
