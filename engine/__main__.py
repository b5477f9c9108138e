"""`python -m engine LAUNCH.json`: loads the model and serves it; started by the supervisor.

Exit codes: 0 when told to stop, 2 where the configuration and the model do not fit, 3 where the
model does not fit into memory, else 1.
"""

from __future__ import annotations

import gc
import logging
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from core.errors import ConfigurationError, InsufficientMemoryError
from core.messages import Dead, Launch
from core.processes import die_with_parent
from engine.phases import Phases

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.tasks.engine import TaskEngine

logger = logging.getLogger("engine")


class _Stopped(BaseException):
    """SIGTERM. Not SystemExit, which is how a handler's own code may fail."""


def main() -> int:
    """Serves until SIGTERM; returns the exit code."""
    signal.signal(signal.SIGTERM, _stop)
    try:
        return _serve()
    except _Stopped:
        return 0


def _stop(*_: object) -> None:
    raise _Stopped


def _serve() -> int:
    die_with_parent()
    phases = Phases()
    # Imported here, and not above, so that a start can say how long it takes.
    from transformers.utils import logging as transformers_logging

    from engine.serve.connection import Connection
    from engine.serve.server import Server

    launch = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Launch)
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s %(message)s")
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()  # a log is no place for one
    with Connection(launch.endpoint) as connection:
        try:
            engine = _build(launch, phases)
            gc.collect()
            gc.freeze()  # what is there stays; collections need not look at it between two steps
            Server(engine, connection, launch.options.job_queue_size).serve_forever()
        except ConfigurationError as error:
            connection.broadcast(Dead(str(error)))
            print(f"longshore: {error}", file=sys.stderr)
            return error.exit_code
        except Exception as error:
            connection.broadcast(Dead(f"{type(error).__name__}: {error}"))
            logger.exception("the engine ends")
            return 1
    return 0


def _build(launch: Launch, phases: Phases) -> Engine | TaskEngine:
    from engine.device import is_out_of_memory

    model_dir = Path(launch.model_dir)
    if launch.library_dir:
        sys.path.insert(0, launch.library_dir)
    try:
        if launch.task.kind == "generation":
            from engine.build import build_engine

            phases.end("imports")
            return build_engine(model_dir, launch.options, phases)
        from engine.tasks.build import build_task_engine

        return build_task_engine(launch.task, model_dir, launch.options)
    except Exception as error:
        if isinstance(error, InsufficientMemoryError) or not is_out_of_memory(error):
            raise
        reason = str(error).strip() or type(error).__name__
        raise InsufficientMemoryError(f"no memory is left to load the model: {reason}") from error


if __name__ == "__main__":
    sys.exit(main())
