"""`python -m engine PARENT LAUNCH_JSON COPY`: loads the model and serves it.

PARENT is the supervisor's process id; this process ends when the supervisor ends. COPY is the
number of this engine's copy of the model, from 0.

Exit codes: 0 after SIGTERM, 2 if the arguments are wrong or the configuration does not fit the
model, 3 if there is too little memory for the model, 1 for any other error.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from core.errors import ConfigurationError, LongshoreError, StoppedError
from core.foreign_code import contained, reason_of
from core.process.gpus import visible_gpus
from core.process.internal_arguments import internal_arguments
from core.process.logs import configure_logs, log_event
from core.process.processes import die_with_parent
from core.protocol.launch import Launch
from core.protocol.messages import Dead
from engine.phases import Phases
from kernels.cpu.shared_library import build_early

if TYPE_CHECKING:
    from engine.serve.connection import Connection
    from engine.serve.emf import EmfReporter
    from engine.serve.service import Service

logger = logging.getLogger(__package__)

LOST_EXIT_S = 1.0
"""How long the process may take to end by itself after a rank is lost."""


def main() -> int:
    """Serve until SIGTERM. Return the exit code."""
    signal.signal(signal.SIGTERM, _stop)
    try:
        parent, launch_path, copy = internal_arguments(
            "engine",
            "The engine, which computes the front end's requests. `longshore serve` starts it.",
            "PARENT:int LAUNCH_JSON COPY:int",
        )
        return _serve(int(parent), Path(launch_path), int(copy))
    except StoppedError:
        return 0


def _stop(*_: object) -> None:
    raise StoppedError


def _serve(parent: int, launch_path: Path, copy: int) -> int:
    die_with_parent(parent)
    launch = msgspec.json.decode(launch_path.read_bytes(), type=Launch)
    configure_logs(launch.options.server.log_format, launch.options.server.log_level, launch.name)
    which = copy if launch.options.layout.copies > 1 else None
    show_phase = _log_phase if launch.options.server.log_format == "json" else _print_phase
    phases = Phases(partial(show_phase, which))
    if _uses_cpu(launch):
        build_early()
    gc.disable()  # imports make no garbage; without the collector they take a sixth less time
    if not sys.stderr.isatty():  # progress bars would clutter a log
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    # Imported here, so that the phase "imports" includes the time they take.
    from engine.serve.connection import Connection
    from engine.serve.server import Server

    may_sleep = launch.task.kind == "handler"
    with Connection(launch.endpoints[copy], may_sleep=may_sleep) as connection:
        try:
            with contained:
                service = _build(launch, phases, connection, copy)
            gc.collect()
            gc.freeze()  # the model stays: keep the collector from scanning it between steps
            options = launch.options
            server = Server(
                service,
                connection,
                options.server.job_queue_size,
                max_waiting_tokens=options.server.job_queue_tokens,
                reporter=_reporter(launch),
            )
            server.serve_forever()
        except ConfigurationError as error:
            connection.broadcast(Dead(str(error)))
            print(f"longshore: {error}", file=sys.stderr)
            return error.exit_code
        except Exception as error:
            connection.broadcast(Dead(reason_of(error)))
            logger.exception("the engine failed")
            return 1
    return 0


def _uses_cpu(launch: Launch) -> bool:
    """Whether the engine will probably run the CPU's kernels; torch would have to be asked."""
    device = launch.options.execution.device
    on_cpu = device == "cpu" or (device == "auto" and not visible_gpus(os.environ))
    return on_cpu and launch.task.kind == "generation"


def _print_phase(copy: int | None, name: str, seconds: float) -> None:
    """Print a phase of start-up. copy: None if the model has a single copy."""
    which = "" if copy is None else f"copy {copy}: "
    print(f"  {which}{name}: {seconds:.1f} s", flush=True)


def _log_phase(copy: int | None, name: str, seconds: float) -> None:
    log_event(logger, "started", copy=copy, phase=name, seconds=round(seconds, 2))


def _reporter(launch: Launch) -> EmfReporter | None:
    from engine.serve.emf import EmfReporter

    period_s = launch.options.server.cloudwatch_metrics_period
    return EmfReporter(launch.model_name, period_s) if period_s is not None else None


def _on_lost(connection: Connection, error: LongshoreError) -> None:
    """End this process because a rank is lost. Called in another thread."""
    from engine.serve.connection import EVERYONE, ConnectionBroken

    connection.inbox.put((EVERYONE, ConnectionBroken(error)))
    # The loop may be waiting for a device, which in turn waits for the lost rank.
    timer = threading.Timer(LOST_EXIT_S, os._exit, (error.exit_code,))
    timer.daemon = True
    timer.start()


def _build(launch: Launch, phases: Phases, connection: Connection, copy: int) -> Service:
    from engine.device import explaining_out_of_memory

    model_dir, options = Path(launch.model_dir), launch.options
    if options.observers.record is not None and options.layout.copies > 1:
        options = options.changed(record=f"{options.observers.record}/copy-{copy}")
    if launch.library_dir:
        sys.path.insert(0, launch.library_dir)
    with explaining_out_of_memory():
        if launch.task.kind == "generation":
            from engine.build import build_engine
            from engine.resolve import with_digest
            from engine.serve.text_service import TextService

            _end_imports(phases)
            on_lost = partial(_on_lost, connection)
            engine = build_engine(model_dir, options, phases, on_lost, launch.rank_address)
            engine.facts = with_digest(engine.facts, options.model, options.memory)
            return TextService(engine, connection)
        from engine.loading.open_model import share_log
        from engine.serve.task_service import TaskService
        from engine.tasks.build import build_task_engine

        share_log()
        _end_imports(phases)
        return TaskService(build_task_engine(launch.task, model_dir, options), connection)


def _end_imports(phases: Phases) -> None:
    gc.freeze()  # imported objects stay until the process ends
    gc.enable()
    phases.end("imports")


if __name__ == "__main__":
    sys.exit(main())
