"""The main process: starts the engine and the front end, monitors them and stops them."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import msgspec
import zmq

from container.configuration.report import banner_lines, facts_lines, listening_line
from container.configuration.resolve import Configuration
from container.launch.children import Child
from container.launch.ports import require_free_port
from container.launch.preparation import PreparedModel
from container.launch.readiness import ReadinessWatch
from core.errors import ConfigurationError, InsufficientMemoryError
from core.logs import configure_logs
from core.messages import Launch
from core.names import python_command

logger = logging.getLogger(__name__)

FRONT_END_STOP_S = 26.0
"""Time for the front end to stop. It gives running requests 25 s (`GRACEFUL_TIMEOUT_S`) to finish;
SageMaker kills the container after 30 s."""
ENGINE_STOP_S = 3.0
_POLL_INTERVAL_S = 0.1
_MAX_SOCKET_PATH = 100
_FINAL_EXIT_CODES = (ConfigurationError.exit_code, InsufficientMemoryError.exit_code)
"""Exit codes of an engine that would fail again if it were restarted."""


@dataclass(frozen=True, slots=True)
class Commands:
    """The commands of the two child processes. The launch file's path is appended to each."""

    engine: Sequence[str] = python_command("engine")
    front_end: Sequence[str] = python_command("container.front_end.start")


class Supervisor:
    """Runs the engine and the front end until one of them fails for good or a signal arrives."""

    def __init__(
        self,
        launch: Launch,
        launch_path: Path,
        commands: Commands,
        print_line: Callable[[str], None],
    ) -> None:
        self._launch = launch
        self._launch_path = str(launch_path)
        self._commands = commands
        self._print_line = print_line
        self._restarts_left = launch.options.retry_threshold
        self._num_stop_signals = 0
        self._facts_printed = False
        self._loading_timed_out = False

    def on_stop_signal(self, signum: int, frame: FrameType | None) -> None:
        """Handle a signal: the first one stops the children gracefully, the second kills them."""
        self._num_stop_signals += 1

    def run(self) -> int:
        """Run until stopped. Return the exit code, which is 0 after a stop signal."""
        with zmq.Context[zmq.Socket[bytes]]() as self._context:
            self._front_end = Child("front end", [*self._commands.front_end, self._launch_path])
            self._engine = self._start_engine()
            try:
                code = self._run_until_stopped()
                if self._num_stop_signals:
                    self._print_line(
                        f"stopping: running requests have {FRONT_END_STOP_S:.0f} s to finish; "
                        "repeat the signal to stop now"
                    )
                self._stop(self._front_end, FRONT_END_STOP_S)
                self._stop(self._engine, ENGINE_STOP_S)
                return code
            finally:
                self._front_end.kill()
                self._engine.kill()
                self._close_readiness()

    def _start_engine(self) -> Child:
        self._readiness: ReadinessWatch | None = ReadinessWatch(
            self._context, self._launch.endpoint
        )
        self._loading_deadline = time.monotonic() + self._launch.options.model_loading_timeout
        # Its temporary files disappear with the run directory, however it ends.
        variables = {**os.environ, "TMPDIR": str(Path(self._launch_path).parent)}
        return Child("engine", [*self._commands.engine, self._launch_path], variables=variables)

    def _close_readiness(self) -> None:
        if self._readiness is not None:
            self._readiness.close()
            self._readiness = None

    def _run_until_stopped(self) -> int:
        """Return the exit code after a stop signal or the loss of a child process."""
        while not self._num_stop_signals:
            self._wait_for_readiness()
            if self._front_end.exit_code is not None:
                logger.error("front end %s", self._front_end.describe_exit())
                return 1
            if self._engine.exit_code is not None:
                logger.error("engine %s", self._engine.describe_exit())
                if not self._restart_engine():
                    return self._exit_code_of_lost_engine()
        return 0

    def _wait_for_readiness(self) -> None:
        """Wait one poll interval. Print the facts of a ready engine; kill an overdue one."""
        if self._readiness is None:
            time.sleep(_POLL_INTERVAL_S)
            return
        facts = self._readiness.wait(_POLL_INTERVAL_S)
        if facts is not None:
            self._close_readiness()
            if not self._facts_printed:
                self._facts_printed = True
                for line in (*facts_lines(facts), listening_line(self._launch)):
                    self._print_line(line)
        elif time.monotonic() > self._loading_deadline:
            timeout = self._launch.options.model_loading_timeout
            logger.error("engine not ready after %d s (option.model_loading_timeout)", timeout)
            self._loading_timed_out = True
            self._engine.kill()

    def _restart_engine(self) -> bool:
        is_final = self._engine.exit_code in _FINAL_EXIT_CODES
        if is_final or not self._restarts_left or self._num_stop_signals:
            return False
        self._restarts_left -= 1
        logger.warning("restarting the engine, restarts_left=%d", self._restarts_left)
        self._engine.kill()
        self._close_readiness()
        self._engine = self._start_engine()
        return True

    def _exit_code_of_lost_engine(self) -> int:
        code = self._engine.exit_code
        if self._num_stop_signals:
            return 0
        if code in _FINAL_EXIT_CODES:
            return code
        # Assume that SIGKILL during loading came from the kernel's out-of-memory killer.
        out_of_memory = (
            code == -signal.SIGKILL and not self._facts_printed and not self._loading_timed_out
        )
        return InsufficientMemoryError.exit_code if out_of_memory else 1

    def _stop(self, child: Child, timeout_s: float) -> None:
        """Terminate the child and wait for its exit, for `timeout_s` or for a second signal."""
        child.terminate()
        deadline = time.monotonic() + timeout_s
        while child.exit_code is None and self._num_stop_signals < 2:
            if time.monotonic() > deadline:
                logger.warning("%s did not end within %.0f s", child.name, timeout_s)
                return
            time.sleep(_POLL_INTERVAL_S / 4)


def supervise(
    configuration: Configuration,
    prepared: PreparedModel,
    port: int,
    commands: Commands | None = None,
    *,
    socket: Path | None = None,
    name: str = "",
) -> int:
    """Serve the model until a signal arrives, and return the exit code.

    Listens on the Unix socket `socket` if given, else on the port. `name` is the model's name in
    requests. Raises ConfigurationError if the port is in use. Call it from the main thread, which
    receives the signals.
    """
    if socket is None:
        require_free_port(port)
    options = configuration.options
    configure_logs(options.log_format, options.log_level, name)
    print_line = _log_line if options.log_format == "json" else _print_line
    # Beside the socket, so that its owner also removes the files of a killed supervisor.
    with run_directory(socket and socket.parent) as run_dir:
        launch = Launch(
            model_dir=str(prepared.model_dir.resolve()),
            endpoint=f"ipc://{run_dir}/engine.sock",
            port=port,
            socket=str(socket or ""),
            name=name,
            options=options,
            task=prepared.task,
            library_dir=str(prepared.library_dir or ""),
            formatters=str(prepared.formatters or ""),
        )
        launch_path = run_dir / "launch.json"
        launch_path.write_bytes(msgspec.json.encode(launch))
        address = str(socket or f"port {port}")
        for line in banner_lines(configuration, launch.model_dir, address, launch.task):
            print_line(line)
        if launch.formatters:
            print_line(f"  formatters: {launch.formatters}")
        supervisor = Supervisor(launch, launch_path, commands or Commands(), print_line)
        with _signal_handler(supervisor.on_stop_signal):
            return supervisor.run()


@contextlib.contextmanager
def run_directory(parent: Path | None = None) -> Generator[Path]:
    """Create a private temporary directory in `parent` or TMPDIR, and delete it at the end.

    Raises ConfigurationError if its path is too long to hold a Unix socket.
    """
    path = Path(tempfile.mkdtemp(prefix="longshore-", dir=parent))
    try:
        if len(str(path)) > _MAX_SOCKET_PATH - len("/engine.sock"):
            raise ConfigurationError(
                f"{path} is too long for a Unix socket path; set a shorter TMPDIR"
            )
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _signal_handler(handler: Callable[[int, FrameType | None], None]) -> Generator[None]:
    signums = (signal.SIGINT, signal.SIGTERM)
    previous = {signum: signal.signal(signum, handler) for signum in signums}
    try:
        yield
    finally:
        for signum, old_handler in previous.items():
            signal.signal(signum, old_handler)


def _print_line(line: str) -> None:
    print(line, flush=True)


def _log_line(line: str) -> None:
    logger.info("%s", line.strip())
