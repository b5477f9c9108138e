"""A helper process that performs jobs for a worker. A job may crash it.

Uses gevent's primitives explicitly, as `container.wire.engine_client` does.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from typing import Generic, TypeVar

import gevent
import gevent.socket
import msgspec
from gevent.lock import BoundedSemaphore

from core.errors import LongshoreError, OverloadedError, RequestError
from core.process.frames import OUT_OF_MEMORY, Refused, read_frame, write_encoded, write_frame
from core.process.names import python_command

logger = logging.getLogger(__name__)

MAX_WAIT_S = 30.0
"""A job may wait this long for its turn, and may then run for as long again. Unless the machine is
overloaded, a job that runs for this long has long exceeded the process's own limit of CPU time."""
GRACE_S = 0.1
"""Time for a process that is dying by itself to exit with its own code before it is killed."""

Answer = TypeVar("Answer")


class Child(Generic[Answer]):
    """The process, started with its first job and again after it dies.

    All calls must come from greenlets of one thread.
    """

    def __init__(
        self, module: str, setup: msgspec.Struct, reply: object, max_wait_s: float = MAX_WAIT_S
    ) -> None:
        """module: what the process runs. setup: its first message. reply: the type of its replies,
        `Answer | Refused`. max_wait_s: limits a job's wait for its turn, then the start of the
        process and the job together."""
        self._module = module
        self._setup = setup
        self._max_wait_s = max_wait_s
        self._decoder = msgspec.msgpack.Decoder[Answer | Refused](reply)  # pyright: ignore[reportArgumentType]
        self._turn = BoundedSemaphore(1)
        self._process: _Process | None = None

    def perform(self, job: msgspec.Struct, field: str) -> Answer:
        """Perform a job once all earlier jobs have ended.

        Raises RequestError if the process refuses the job or, naming `field`, if the job kills the
        process. Raises OverloadedError when the time is up, and LongshoreError if the process ends
        by itself. Raises OverflowError for a job with an integer of more than 64 bits.
        """
        try:
            message = msgspec.msgpack.encode(job)
        except RecursionError:
            raise RequestError(field, "is nested too deeply") from None
        late = OverloadedError("the server has no time to prepare the request")
        if not self._turn.acquire(timeout=self._max_wait_s):
            raise late
        try:
            with gevent.Timeout(self._max_wait_s, late):
                reply = self._decoder.decode(self._ask(message, type(job).__name__, field))
        finally:
            self._turn.release()
        if isinstance(reply, Refused):
            raise RequestError(reply.field, reply.message)
        return reply

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.end()
            self._process = None

    def _ask(self, message: bytes, kind: str, field: str) -> bytes:
        if self._process is None:
            self._process = _Process(self._module, self._setup)
        process = self._process
        try:
            return process.ask(message)
        except (EOFError, OSError):
            code = process.end()
            self._process = None
            logger.warning("helper=died code=%d job=%s", code, kind)
            raise _error_of(code, field) from None
        except BaseException:  # else the next job would get this job's reply
            self.close()
            raise


class _Process:
    """One process and the connection to it."""

    def __init__(self, module: str, setup: msgspec.Struct) -> None:
        self._socket, theirs = gevent.socket.socketpair()
        command = (*python_command(module), str(os.getpid()))
        with theirs:
            # gevent's subprocess would fork in Python, which runs the fork hooks of libraries.
            # OpenTelemetry's hook switches greenlets: the child would run the worker's loop.
            self._pid = os.posix_spawn(
                command[0],
                command,
                os.environ,
                file_actions=[(os.POSIX_SPAWN_DUP2, theirs.fileno(), 0)],
                setsid=True,
            )
        self._stream = self._socket.makefile("rb")
        write_frame(self._socket.sendall, setup)

    def ask(self, message: bytes) -> bytes:
        """Send a job and wait for the reply. Raises EOFError or OSError if the process dies."""
        write_encoded(self._socket.sendall, message)
        return read_frame(self._stream)

    def end(self) -> int:
        """Kill the process, if it runs, and return its exit code."""
        self._stream.close()
        self._socket.close()
        deadline = time.monotonic() + GRACE_S
        while (ended := os.waitpid(self._pid, os.WNOHANG))[0] == 0:
            if time.monotonic() >= deadline:
                os.kill(self._pid, signal.SIGKILL)
            gevent.sleep(0.005)
        return os.waitstatus_to_exitcode(ended[1])


def _error_of(code: int, field: str) -> LongshoreError:
    """Return the error for a job during which the process ended with this exit code."""
    if code == OUT_OF_MEMORY:
        return RequestError(field, "takes too much memory to prepare; make it smaller")
    if code >= 0:
        return LongshoreError(f"the helper process ended with exit code {code}")
    if -code == signal.SIGPROF:
        return RequestError(field, "takes too long to prepare; make it smaller or simpler")
    name = signal.Signals(-code).name
    return RequestError(field, f"is too complex or nested too deeply ({name} while preparing it)")
