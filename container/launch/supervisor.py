"""The main process: starts the engines and the front end, monitors them and stops them."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from container.configuration.report import banner_lines, facts_lines, listening_line
from container.configuration.resolve import Configuration
from container.launch.children import Child
from container.launch.engine_process import EngineProcess
from container.launch.ports import require_free_port
from container.launch.preparation import PreparedModel
from container.launch.stop_times import ENGINE_STOP_S, FRONT_END_STOP_S, RUNNING_REQUESTS_S
from core.configuration.layout import Layout, layout_here
from core.configuration.task import Task
from core.errors import ConfigurationError
from core.process.logs import configure_logs
from core.process.names import python_command
from core.process.processes import note_stop_signals, reap_orphans
from core.protocol.facts import Facts
from core.protocol.launch import Launch

logger = logging.getLogger(__name__)

_POLL_INTERVAL_S = 0.1
_MAX_SOCKET_PATH = 100
"""Linux allows 107 bytes. The sockets of further copies have longer names, which need the rest."""


@dataclass(frozen=True, slots=True)
class Commands:
    """The commands of the child processes.

    This process's id and the launch file's path are appended to each command, and the number of the
    copy to an engine's.
    """

    engine: Sequence[str] = python_command("engine")
    front_end: Sequence[str] = python_command("container.front_end.start")


class Supervisor:
    """Runs the engines and the front end until one of them fails for good or a signal arrives.

    One of several engines may fail for good, once it has served, as long as another one is left.
    """

    def __init__(
        self,
        launch: Launch,
        launch_path: Path,
        layout: Layout,
        commands: Commands,
        print_line: Callable[[str], None],
        stop_signals: Sequence[int],
    ) -> None:
        """stop_signals: collects the signals. The first one stops the children gracefully, the
        second one kills them."""
        self._launch = launch
        self._launch_path = str(launch_path)
        self._layout = layout
        self._commands = commands
        self._print_line = print_line
        self._stop_signals = stop_signals
        self._facts_printed = False

    def run(self) -> int:
        """Run until stopped. Return the exit code, which is 0 after a stop signal."""
        with zmq.Context[zmq.Socket[bytes]]() as context:
            self._front_end = Child("front end", self._with_launch(self._commands.front_end))
            self._engines = [
                self._start_engine(copy, context) for copy in range(self._layout.num_copies)
            ]
            try:
                code = self._run_until_stopped()
                if self._stop_signals:
                    self._print_line(
                        f"stopping; running requests have {RUNNING_REQUESTS_S} s to finish; "
                        "repeat the signal to stop now"
                    )
                self._stop([self._front_end], FRONT_END_STOP_S)
                self._stop([engine.child for engine in self._engines], ENGINE_STOP_S)
                return code
            finally:
                self._front_end.kill()
                for engine in self._engines:
                    engine.close()

    def _start_engine(self, copy: int, context: zmq.Context[zmq.Socket[bytes]]) -> EngineProcess:
        # The engine's temporary files disappear with the run directory, however the engine ends.
        variables = {**os.environ, "TMPDIR": str(Path(self._launch_path).parent)}
        return EngineProcess(
            "engine" if self._layout.num_copies == 1 else f"engine of copy {copy}",
            [*self._with_launch(self._commands.engine), str(copy)],
            self._layout.variables(copy, variables),
            self._launch.endpoints[copy],
            self._launch.options,
            context,
        )

    @property
    def _children(self) -> list[Child]:
        return [self._front_end, *(engine.child for engine in self._engines)]

    def _with_launch(self, command: Sequence[str]) -> list[str]:
        """Return a child's command with its first arguments: our process id and the launch file."""
        return [*command, str(os.getpid()), self._launch_path]

    def _run_until_stopped(self) -> int:
        """Return the exit code after a stop signal or the loss of a child process."""
        while not self._stop_signals:
            self._wait()
            reap_orphans([child.pid for child in self._children])
            if self._front_end.exit_code is not None:
                logger.error("front end %s", self._front_end.describe_exit())
                return 1
            for engine in self._engines:
                if engine.has_ended and not self._recover_from_end(engine):
                    return 0 if self._stop_signals else engine.final_exit_code
        return 0

    def _wait(self) -> None:
        """Wait one poll interval. Print the facts of engines that become ready."""
        starting = [engine for engine in self._engines if engine.is_starting]
        if not starting:
            time.sleep(_POLL_INTERVAL_S)
        for engine in starting:
            facts = engine.wait_until_ready(_POLL_INTERVAL_S / len(starting))
            if facts is not None:
                self._print_ready(engine, facts)

    def _print_ready(self, engine: EngineProcess, facts: Facts) -> None:
        if not self._facts_printed:
            self._facts_printed = True
            lines = facts_lines(facts, self._layout.num_copies)
            for line in (*lines, listening_line(self._launch)):
                self._print_line(line)
        if self._layout.num_copies > 1:
            self._print_line(f"{engine.name} is ready")

    def _recover_from_end(self, engine: EngineProcess) -> bool:
        """Restart an engine that has ended, or go on without it. Return False if neither works."""
        logger.error("%s %s", engine.name, engine.child.describe_exit())
        if self._stop_signals:
            return False
        if engine.restart():
            return True
        engine.give_up()
        num_left = sum(not other.is_given_up for other in self._engines)
        if not engine.has_served or not num_left:
            return False
        logger.error("%s stays down, engines_left=%d", engine.name, num_left)
        return True

    def _stop(self, children: Sequence[Child], timeout_s: float) -> None:
        """End the children. Waits up to `timeout_s`, and not after a second signal."""
        for child in children:
            child.terminate()
        deadline = time.monotonic() + timeout_s
        while len(self._stop_signals) < 2:
            running = [child.name for child in children if child.exit_code is None]
            if not running:
                return
            if time.monotonic() > deadline:
                logger.warning("%s did not end within %.0f s", ", ".join(running), timeout_s)
                return
            time.sleep(_POLL_INTERVAL_S / 4)


def supervise(
    configuration: Configuration,
    prepared: PreparedModel,
    port: int,
    commands: Commands | None = None,
    *,
    host: str = "",
    socket: Path | None = None,
    name: str = "",
    rank_address: str = "",
) -> int:
    """Serve the model until a signal arrives, and return the exit code.

    Listens on the Unix socket `socket` if given, else on the port of the address `host`, or of all
    addresses if it is empty. `name` is the model's name in requests. Raises ConfigurationError if
    the port is in use, if ranks of other machines could not join, and what `layout_here` raises.
    Call it from the main thread, which receives the signals.
    """
    if socket is None:
        require_free_port(port, host)
    options = configuration.options
    layout = layout_here(options)
    if options.layout.nodes > 1:
        _require_fleet(options.layout.nodes, prepared.task, rank_address)
    configure_logs(options.server.log_format, options.server.log_level, name)
    print_line = _log_line if options.server.log_format == "json" else _print_line
    stop_signals = note_stop_signals()
    # The run directory is beside the socket, so that the socket's owner also removes the files of a
    # killed supervisor.
    with run_directory(socket and socket.parent) as run_dir:
        launch = Launch(
            model_dir=str(prepared.model_dir.resolve()),
            endpoint=f"ipc://{run_dir}/engine.sock",
            port=port,
            host=host,
            socket=str(socket or ""),
            name=name,
            options=options,
            task=prepared.task,
            library_dir=str(prepared.library_dir or ""),
            formatters=str(prepared.formatters or ""),
            hooks=prepared.hooks,
            rank_address=rank_address,
        )
        launch_path = run_dir / "launch.json"
        launch_path.write_bytes(msgspec.json.encode(launch))
        address = str(socket or f"port {port}")
        for line in banner_lines(configuration, launch.model_dir, address, launch.task):
            print_line(line)
        for line in layout.lines() if layout.num_copies > 1 else ():
            print_line(line)
        if launch.formatters:
            print_line(f"  formatters: {launch.formatters}")
        for option, place in launch.hooks.items():
            print_line(f"  {option}: {place}")
        commands = commands or Commands()
        return Supervisor(launch, launch_path, layout, commands, print_line, stop_signals).run()


def _require_fleet(nodes: int, task: Task, rank_address: str) -> None:
    """Raise ConfigurationError if there are no ranks on other nodes, or they would have no work."""
    if task.kind != "generation":
        raise ConfigurationError(
            f"option.nodes={nodes}: {task.name} ({task.reason}) runs on one machine; only "
            "text generation runs on several"
        )
    if not rank_address:
        raise ConfigurationError(
            f"option.nodes={nodes}: only a fleet runs a model on several machines; use "
            "`longshore fleet serve`, or leave the option out"
        )


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


def _print_line(line: str) -> None:
    print(line, flush=True)


def _log_line(line: str) -> None:
    logger.info("%s", line.strip())
