"""The process in front of several models: a port, and a container for each model."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gevent
from flask import Flask
from gevent.event import Event
from gevent.pywsgi import WSGIHandler, WSGIServer
from werkzeug.wsgi import ClosingIterator

from container.launch.ports import require_free_port
from container.launch.supervisor import run_directory
from container.multi_model.app import create_front
from container.multi_model.model import RefusedError
from container.multi_model.model_container import COMMAND
from container.multi_model.models import Models
from core.errors import ConfigurationError, InsufficientMemoryError

_BACKLOG = 2048
_LAST_BYTES_S = 1.0


def serve_models(
    entries: Mapping[str, Path],
    port: int,
    variables: Mapping[str, str],
    command: Sequence[str] = COMMAND,
) -> int:
    """Serves these models, and what is loaded beside them, until a signal; the exit code.

    Raises ConfigurationError where the port is taken or one of them cannot be loaded. Needs the
    main thread, for signals and for its children.
    """
    require_free_port(port)
    logging.basicConfig(
        level="INFO",
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    with run_directory() as run_dir:
        models = Models(run_dir, variables, command)
        front = _Front(create_front(models))
        server = WSGIServer(
            ("0.0.0.0", port),
            front,
            backlog=_BACKLOG,
            log=None,
            handler_class=_Handler,
            environ={"SERVER_NAME": "localhost"},
        )
        with _signals(models) as (stop, haste):
            server.start()
            print(f"Longshore on port {port}, for several models", flush=True)
            try:
                _load_all(models, entries)
                stop.wait()
            except RefusedError as error:
                if not stop.is_set():
                    kind = InsufficientMemoryError if error.code == 507 else ConfigurationError
                    raise kind(str(error)) from None
            finally:
                server.close()
                models.stop(haste)
                front.idle.wait(_LAST_BYTES_S)
    return 0


class _Front:
    """The application, and whether it has any request to answer."""

    def __init__(self, app: Flask) -> None:
        self.idle = Event()
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


class _Handler(WSGIHandler):
    """Tells the application its client's socket, as gunicorn does, to see when it hangs up."""

    def get_environ(self) -> dict[str, Any]:
        return {**super().get_environ(), "gunicorn.socket": self.socket}


def _load_all(models: Models, entries: Mapping[str, Path]) -> None:
    for name, path in entries.items():
        models.load(name, str(path))
    models.is_open = True


@contextmanager
def _signals(models: Models) -> Generator[tuple[Event, Event]]:
    """Events of the first signal, which asks the models to end, and of the second."""
    stop, haste = Event(), Event()

    def take() -> None:
        if stop.is_set():
            haste.set()
            return
        print("stopping: what runs may end; the same signal again ends it now", flush=True)
        stop.set()
        models.ask_to_stop()

    handlers = [gevent.signal_handler(each, take) for each in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield stop, haste
    finally:
        for handler in handlers:
            handler.cancel()
