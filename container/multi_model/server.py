"""Serves several models on one port, with a container for each model."""

from __future__ import annotations

import signal
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import gevent
from flask import Flask
from gevent.event import AsyncResult, Event
from werkzeug.wsgi import ClosingIterator

from container.configuration.report import url_host
from container.configuration.resolve import load_configuration
from container.front_end.connections import possible_connections
from container.launch.ports import listen, require_free_port
from container.launch.supervisor import run_directory
from container.multi_model.app import create_front
from container.multi_model.http_server import HttpServer
from container.multi_model.model import RefusedError
from container.multi_model.model_container import COMMAND
from container.multi_model.model_registry import ModelRegistry
from container.multi_model.overrides import Overrides
from container.multi_model.strategies import Comparison
from container.security.authentication import open_gate
from container.security.source_roots import source_roots
from container.security.tls import tls_context
from container.ui.routes import Page
from core.errors import ConfigurationError, InsufficientMemoryError
from core.process.logs import configure_logs

_LAST_RESPONSE_S = 1.0
_REAP_INTERVAL_S = 1.0


def serve_models(
    entries: Mapping[str, Path],
    port: int,
    variables: Mapping[str, str],
    command: Sequence[str] = COMMAND,
    comparison: Comparison | None = None,
    *,
    host: str = "",
) -> int:
    """Serve these models, and models loaded later, until a signal. Return the exit code.

    With a `comparison`, the entries are strategies, and a page shows them side by side.

    Raises ConfigurationError if the port is in use, one of `entries` cannot be loaded, or the API
    keys or the certificate cannot be read. Call it from the main thread, which receives signals and
    must start the child processes.
    """
    require_free_port(port, host)
    given = comparison.options if comparison else load_configuration(None, variables).options
    options = given.server
    page = Page(options, "compare.html") if comparison and options.ui != "false" else None
    gate, tls = open_gate(options, has_limits=False), tls_context(options)
    sources = source_roots(options, {path.parent for path in entries.values()})
    configure_logs(options.log_format, options.log_level)
    # A request has a second connection, to its model.
    connections = possible_connections(options.max_connections, files_each=2)
    options = replace(options, max_connections=connections)
    served = "strategies" if comparison else "models"
    with _stop_signals() as (stop, stop_now), run_directory() as run_dir:
        models = ModelRegistry(run_dir, variables, command)
        front = create_front(models, gate, sources, options.cors_allowed_origin, page)
        app = _BusyTracker(front)
        server = HttpServer(listen(port, host), app, options, tls)
        server.start()
        print(f"Longshore on port {port}, serving several {served}", flush=True)
        try:
            overrides: Mapping[str, Overrides] = comparison.overrides if comparison else {}
            # Loading may take long, and a signal must end the wait for it.
            loading: AsyncResult[None] = AsyncResult()
            gevent.spawn(_load_all, models, entries, overrides, loading)
            gevent.wait([loading, stop], count=1)
            if not stop.is_set():
                loading.get()
                if page is not None:
                    page_url = f"{'https' if tls else 'http'}://{url_host(host)}:{port}/"
                    print(f"the strategies side by side: {page_url}", flush=True)
            while not stop.wait(_REAP_INTERVAL_S):
                models.reap_orphans()
        except RefusedError as error:
            kind = InsufficientMemoryError if error.code == 507 else ConfigurationError
            raise kind(str(error)) from None
        finally:
            server.close()
            models.stop(stop_now)
            app.idle.wait(_LAST_RESPONSE_S)
    return 0


class _BusyTracker:
    """WSGI middleware that tracks whether requests are running."""

    def __init__(self, app: Flask) -> None:
        self.idle = Event()
        """Set while no request runs."""
        self.idle.set()
        self._app = app
        self._num_requests = 0

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        self._num_requests += 1
        self.idle.clear()
        return ClosingIterator(self._app(environ, start_response), self._end)

    def _end(self) -> None:
        self._num_requests -= 1
        if not self._num_requests:
            self.idle.set()


def _load_all(
    models: ModelRegistry,
    entries: Mapping[str, Path],
    overrides: Mapping[str, Overrides],
    loading: AsyncResult[None],
) -> None:
    """Load the models. `loading` then says that all are loaded, or why one is not."""
    try:
        for name, path in entries.items():
            models.load(name, str(path), overrides.get(name))
        models.initial_models_loaded = True
        loading.set(None)
    except Exception as error:
        loading.set_exception(error)


@contextmanager
def _stop_signals() -> Generator[tuple[Event, Event]]:
    """Handle signals: the first one sets the first event, the second one the second event."""
    stop, stop_now = Event(), Event()

    def handle() -> None:
        if stop.is_set():
            stop_now.set()
            return
        print("stopping: running requests may finish; repeat the signal to stop now", flush=True)
        stop.set()

    signums = (signal.SIGINT, signal.SIGTERM)
    previous = {signum: signal.getsignal(signum) for signum in signums}
    handlers = [gevent.signal_handler(signum, handle) for signum in signums]
    try:
        yield stop, stop_now
    finally:
        for handler in handlers:
            handler.cancel()  # leaves the signal to its default, which ends the process
        for signum, own in previous.items():
            signal.signal(signum, own)
