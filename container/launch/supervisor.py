"""The process that starts the others, says what it started, and ends with all of them."""

from __future__ import annotations

import contextlib
import logging
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import msgspec
import zmq

from container.configuration.report import banner_lines, facts_lines
from container.configuration.resolve import Configuration
from container.launch.children import Child
from container.launch.ports import require_free_port
from container.launch.preparation import Prepared
from container.launch.readiness import ReadinessWatch
from core.errors import ConfigurationError, InsufficientMemoryError
from core.messages import Launch

logger = logging.getLogger(__name__)

FRONT_END_STOP_S = 26.0
"""Running requests have 25 s to end (`frontend.GRACEFUL_TIMEOUT_S`); SageMaker kills after 30."""
ENGINE_STOP_S = 3.0
_TICK_S = 0.1
_MAX_SOCKET_PATH = 100
_REFUSALS = (ConfigurationError.exit_code, InsufficientMemoryError.exit_code)
"""Exit codes of an engine that would end again."""


@dataclass(frozen=True, slots=True)
class Commands:
    """How the two children are started; the launch file's path is added."""

    engine: Sequence[str] = (sys.executable, "-m", "engine")
    front_end: Sequence[str] = (sys.executable, "-m", "container.front_end.start")


class Supervisor:
    """Runs the engine and the front end until one of them is lost or a signal asks to stop."""

    def __init__(
        self,
        launch: Launch,
        launch_path: Path,
        commands: Commands,
        say: Callable[[str], None],
    ) -> None:
        self._launch = launch
        self._launch_path = str(launch_path)
        self._commands = commands
        self._say = say
        self._restarts_left = launch.options.retry_threshold
        self._stops_asked = 0
        self._facts_said = False
        self._is_late = False

    def ask_to_stop(self, signum: int, frame: FrameType | None) -> None:
        """A signal handler: the first signal asks the children to end, the second ends them."""
        self._stops_asked += 1

    def run(self) -> int:
        """Returns the exit code: 0 after a requested stop."""
        with zmq.Context[zmq.Socket[bytes]]() as self._context:
            self._front_end = Child("front end", [*self._commands.front_end, self._launch_path])
            self._engine = self._start_engine()
            try:
                code = self._watch()
                if self._stops_asked:
                    self._say(
                        f"stopping: running requests have {FRONT_END_STOP_S:.0f} s to end; "
                        "the same signal again ends them now"
                    )
                self._stop(self._front_end, FRONT_END_STOP_S)
                self._stop(self._engine, ENGINE_STOP_S)
                return code
            finally:
                self._front_end.kill()
                self._engine.kill()
                self._forget_readiness()

    def _start_engine(self) -> Child:
        self._readiness: ReadinessWatch | None = ReadinessWatch(
            self._context, self._launch.endpoint
        )
        self._loading_deadline = time.monotonic() + self._launch.options.model_loading_timeout
        return Child("engine", [*self._commands.engine, self._launch_path])

    def _forget_readiness(self) -> None:
        if self._readiness is not None:
            self._readiness.close()
            self._readiness = None

    def _watch(self) -> int:
        """Returns the exit code once something has ended that must not, or a stop is asked for."""
        while not self._stops_asked:
            self._await_tick()
            if self._front_end.exit_code is not None:
                logger.error("front end %s", self._front_end.how_it_ended())
                return 1
            if self._engine.exit_code is not None:
                logger.error("engine %s", self._engine.how_it_ended())
                if not self._restart_engine():
                    return self._code_for_lost_engine()
        return 0

    def _await_tick(self) -> None:
        """Lets a moment pass, in which the engine may become ready, or be late for it."""
        if self._readiness is None:
            time.sleep(_TICK_S)
            return
        facts = self._readiness.wait(_TICK_S)
        if facts is not None:
            self._forget_readiness()
            if not self._facts_said:
                self._facts_said = True
                for line in facts_lines(facts):
                    self._say(line)
        elif time.monotonic() > self._loading_deadline:
            timeout = self._launch.options.model_loading_timeout
            logger.error("engine not ready after %d s (option.model_loading_timeout)", timeout)
            self._is_late = True
            self._engine.kill()

    def _restart_engine(self) -> bool:
        refused = self._engine.exit_code in _REFUSALS
        if refused or not self._restarts_left or self._stops_asked:
            return False
        self._restarts_left -= 1
        logger.warning("engine starts again, restarts_left=%d", self._restarts_left)
        self._engine.kill()
        self._forget_readiness()
        self._engine = self._start_engine()
        return True

    def _code_for_lost_engine(self) -> int:
        code = self._engine.exit_code
        if self._stops_asked:
            return 0
        if code in _REFUSALS:
            return code
        # While it loads nobody else kills it than the kernel that has no memory left.
        is_short = code == -signal.SIGKILL and not self._facts_said and not self._is_late
        return InsufficientMemoryError.exit_code if is_short else 1

    def _stop(self, child: Child, within_s: float) -> None:
        """Asks it to end and waits, unless a second signal has asked for haste."""
        child.terminate()
        deadline = time.monotonic() + within_s
        while child.exit_code is None and self._stops_asked < 2:
            if time.monotonic() > deadline:
                logger.warning("%s did not end within %.0f s", child.name, within_s)
                return
            time.sleep(_TICK_S / 4)


def supervise(
    configuration: Configuration,
    prepared: Prepared,
    port: int,
    commands: Commands | None = None,
    *,
    socket: Path | None = None,
    name: str = "",
) -> int:
    """Serves the model on the port until a signal; returns the exit code.

    `socket`: the Unix socket to serve on, in place of the port; `name`: what clients call the
    model. Raises ConfigurationError where the port is taken. Needs the main thread, for signals.
    """
    if socket is None:
        require_free_port(port)
    logging.basicConfig(
        level="INFO",
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    # Beside its socket, so that whoever gave it removes what a killed supervisor leaves.
    with run_directory(socket and socket.parent) as run_dir:
        launch = Launch(
            model_dir=str(prepared.model_dir.resolve()),
            endpoint=f"ipc://{run_dir}/engine.sock",
            port=port,
            socket=str(socket or ""),
            name=name,
            options=configuration.options,
            task=prepared.task,
            library_dir=str(prepared.library_dir or ""),
            formatters=str(prepared.formatters or ""),
        )
        launch_path = run_dir / "launch.json"
        launch_path.write_bytes(msgspec.json.encode(launch))
        address = str(socket or f"port {port}")
        for line in banner_lines(configuration, launch.model_dir, address, launch.task):
            _say(line)
        if launch.formatters:
            _say(f"  formatters: {launch.formatters}")
        supervisor = Supervisor(launch, launch_path, commands or Commands(), _say)
        with _signals_to(supervisor.ask_to_stop):
            return supervisor.run()


@contextlib.contextmanager
def run_directory(parent: Path | None = None) -> Generator[Path]:
    """A directory that only this user can read, short enough for the path of a socket.

    Below `parent`, or TMPDIR.
    """
    path = Path(tempfile.mkdtemp(prefix="longshore-", dir=parent))
    try:
        if len(str(path)) > _MAX_SOCKET_PATH - len("/engine.sock"):
            raise ConfigurationError(f"{path} is too long for a socket's path: shorten TMPDIR")
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _signals_to(handler: Callable[[int, FrameType | None], None]) -> Generator[None]:
    previous = {each: signal.signal(each, handler) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, old_handler in previous.items():
            signal.signal(each, old_handler)


def _say(line: str) -> None:
    print(line, flush=True)
