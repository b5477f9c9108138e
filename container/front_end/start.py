"""The front-end process: gunicorn and its workers, which handle HTTP and text.

`python -m container.front_end.start PARENT LAUNCH_JSON`

PARENT is the process id of the supervisor. This process ends when the supervisor ends.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
from flask import Flask
from gevent.ssl import SSLContext
from gunicorn.app.base import BaseApplication
from gunicorn.arbiter import Arbiter

from container.configuration.report import report_error
from container.front_end.connections import possible_connections
from container.front_end.worker import http_settings
from container.http.failures import Failure, refusal_reason
from container.http.health import HEALTH_PATHS
from container.launch.ports import listen
from container.launch.stop_times import FAILED_REQUESTS_S, RUNNING_REQUESTS_S
from container.security.authentication import open_gate
from container.security.tls import tls_context
from core.configuration.options import ServerOptions
from core.errors import ConfigurationError
from core.process.internal_arguments import internal_arguments
from core.process.logs import configure_logs
from core.process.names import full_name
from core.process.processes import die_with_parent, num_cores
from core.protocol.launch import Launch
from core.routing import LeastLoaded, PrefixAware

if TYPE_CHECKING:
    from container.apis.generation.formatters import Functions
    from container.hooks.load import Hooks
    from container.tracing.tracing import Tracing
    from container.wire.engine_client import EngineClient

logger = logging.getLogger(__name__)

_POLL_INTERVAL_S = 0.1
GRACEFUL_TIMEOUT_S = RUNNING_REQUESTS_S + FAILED_REQUESTS_S
STUCK_WORKER_S = 120
"""A worker whose event loop is blocked for this long is replaced. Streams do not block it."""
NICENESS = 10
"""The front end runs at a lower priority than the engine, with which it shares cores on a CPU. When
a thread of the engine is interrupted in a matmul, all its other threads wait. The front end
still gets time between matmuls, and when it is late it sends several tokens at once."""


class PatientArbiter(Arbiter):
    """Gives workers the graceful timeout to end, even if somebody sets the wall clock meanwhile.

    Adds a worker, up to a maximum, when one has too much to do and asks for it.
    """

    def handle_ttin(self) -> None:
        if self.num_workers < cast(FrontEnd, self.app).max_workers:
            logger.info("event=worker_added workers=%d reason='busy'", self.num_workers + 1)
            super().handle_ttin()

    def stop(self, graceful: bool = True) -> None:
        self._deadline = time.monotonic() + self.cfg.graceful_timeout
        super().stop(graceful)

    def kill_workers(self, sig: int) -> None:
        """Send a signal to the workers. gunicorn sends SIGKILL when the time is up by its clock."""
        while sig == signal.SIGKILL and self.WORKERS and time.monotonic() < self._deadline:
            self.reap_workers()
            time.sleep(_POLL_INTERVAL_S)
        super().kill_workers(sig)


class FrontEnd(BaseApplication):
    """gunicorn, configured from the launch file instead of its own options.

    The constructor raises ConfigurationError if the API keys cannot be read or the port is in use.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._address = (
            f"unix:{launch.socket}"
            if launch.socket
            else f"fd://{listen(launch.port, launch.host).detach()}"
        )
        # With several models, the process in front of them checks the clients' keys. It sends none
        # when it reads /metrics.
        open_paths = (*HEALTH_PATHS, "/metrics") if launch.name else HEALTH_PATHS
        self._gate = open_gate(launch.options.server, open_paths=open_paths)
        super().__init__()

    def run(self) -> None:
        """Serve until SIGTERM."""
        PatientArbiter(self).run()

    def load_config(self) -> None:
        """Set gunicorn's settings. Called by gunicorn."""
        for name, value in gunicorn_settings(self._launch, self._address).items():
            self.cfg.set(name, value)

    def load(self) -> Flask:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the application. Called in each worker, after the fork and monkey-patching."""
        from container.front_end.app import create_app, create_task_app
        from core.text.template_files import load_chat_template
        from core.text.tokenizer import Tokenizer

        launch, options = self._launch, self._launch.options
        model_dir = Path(launch.model_dir)
        caches_prefixes = options.memory.enable_prefix_caching
        timeout_s = options.server.heartbeat_timeout
        self._client = _connect(launch.endpoints, timeout_s, caches_prefixes=caches_prefixes)
        self._client.delay_streams(options.server.stream_delay / 1000)
        self._tracing = _open_tracing(options.server)
        name, hooks = launch.model_name, self._hooks()
        if launch.task.kind != "generation":
            return create_task_app(
                self._client, options, name, launch.task, self._gate, self._tracing, hooks
            )
        return create_app(
            self._client,
            Tokenizer(model_dir),
            options,
            name,
            load_chat_template(model_dir, options.model.chat_template),
            self._formatters(),
            self._gate,
            tracing=self._tracing,
            hooks=hooks,
        )

    def _formatters(self) -> Functions | None:
        from container.apis.generation.formatters import load_formatters

        path = self._launch.formatters
        return load_formatters(Path(path), self._launch.library_dir) if path else None

    def _hooks(self) -> Hooks | None:
        from container.hooks.load import load_hooks

        hooks = self._launch.hooks
        return load_hooks(hooks, self._launch.library_dir) if hooks else None

    @property
    def server(self) -> ServerOptions:
        """The options of the server. Read by the worker."""
        return self._launch.options.server

    @property
    def max_workers(self) -> int:
        """The most workers that there may be. Read by the arbiter."""
        return worker_counts(self.server.http_workers, num_cores())[1]

    def count_refusal(self, status: int) -> None:
        """Count a request that the worker refuses."""
        self._client.count_refusal(refusal_reason(status))

    def error_body(self, failure: Failure, path: str) -> object:
        """Return the body of the answer to such a request."""
        from container.apis.table import error_body

        return error_body(failure, path)

    def end_watching(self) -> None:
        """End the event streams of live pages, which never end by themselves."""
        self._client.end_watching()

    def end_requests(self, reason: str) -> None:
        """Fail every running request. Called in a worker that must stop."""
        self._client.fail_all(reason)

    def end_tracing(self) -> None:
        """Send the spans of the last requests, or give up after a second."""
        if self._tracing is not None:
            self._tracing.close()


def _connect(endpoints: Sequence[str], timeout_s: float, *, caches_prefixes: bool) -> EngineClient:
    """Connect to the engines. Call it after the fork and monkey-patching."""
    from container.wire import copies_client, engine_client

    if len(endpoints) == 1:
        return engine_client.EngineClient(*endpoints, heartbeat_timeout_s=timeout_s)
    router = PrefixAware() if caches_prefixes else LeastLoaded()
    return copies_client.CopiesClient(*endpoints, heartbeat_timeout_s=timeout_s, router=router)


def _open_tracing(server: ServerOptions) -> Tracing | None:
    """Return the worker's tracer. OpenTelemetry is imported only with the option."""
    if server.otlp_traces_endpoint is None:
        return None
    from container.tracing.tracing import Tracing

    return Tracing(server.otlp_traces_endpoint)


def gunicorn_settings(launch: Launch, address: str) -> dict[str, Any]:
    """Return all settings that differ from gunicorn's defaults. address: where it listens."""
    server = launch.options.server

    def make_tls_context(conf: object, default: object) -> SSLContext | None:
        return tls_context(server)

    return {
        "bind": address,
        "ssl_context": make_tls_context,
        "worker_class": full_name("container.front_end.worker.DrainingWorker"),
        "workers": worker_counts(server.http_workers, num_cores())[0],
        **http_settings(server, is_tls=not launch.socket),
        "timeout": STUCK_WORKER_S,
        "graceful_timeout": GRACEFUL_TIMEOUT_S,
        "control_socket_disable": True,
        "proc_name": "longshore",
    }


def worker_counts(given: int | None, cores: int) -> tuple[int, int]:
    """Return the number of workers at first, and the most that there may be.

    given: `option.http_workers`. By default, a worker has a share of the cores of a CPU that the
    engine needs, so there is one until it is busy.
    """
    return (given, given) if given else (1, max(1, cores // 4))


def read_launch(path: Path) -> Launch:
    """Read the launch file, which the supervisor wrote."""
    return msgspec.json.decode(path.read_bytes(), type=Launch)


def main(parent: str, launch_path: str) -> int:
    """Serve until SIGTERM. Returns an exit code only if it cannot start; else gunicorn exits."""
    die_with_parent(int(parent))
    os.nice(NICENESS)
    launch = read_launch(Path(launch_path))
    options = launch.options
    configure_logs(options.server.log_format, options.server.log_level, launch.name)
    options = options.changed(max_connections=possible_connections(options.server.max_connections))
    launch = msgspec.structs.replace(launch, options=options)
    # Texts are tokenized one at a time, so the tokenizer's threads would have nothing to do.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        front_end = FrontEnd(launch)
    except ConfigurationError as error:
        return report_error(error)
    front_end.run()
    return 0


if __name__ == "__main__":
    description = "The HTTP front end, gunicorn with its workers. `longshore serve` starts it."
    form = "PARENT:int LAUNCH_JSON"
    sys.exit(main(*internal_arguments("container.front_end.start", description, form)))
