"""Starts the helper process of a worker and sends it jobs.

Uses gevent's primitives explicitly, as `container.wire.engine_client` does.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections import OrderedDict
from pathlib import Path

import gevent
import gevent.socket
import msgspec
from gevent.lock import BoundedSemaphore

from container.isolation.jobs import (
    Compile,
    Job,
    Refused,
    Render,
    Reply,
    Setup,
    read_frame,
    write_frame,
)
from core.errors import LongshoreError, OverloadedError, RequestError
from core.limits import GRAMMAR
from core.names import python_command
from core.structured_outputs import StructuredOutputsParams
from core.text.chat_template import ChatTemplateSource
from core.text.grammar import FIELD

logger = logging.getLogger(__name__)

MAX_KEPT = 64
"""Constraints whose grammars are kept, since most clients send the same few again and again."""
MAX_WAIT_S = 30.0
"""Time for which a job may take its turn and run. CPU time, which the process limits itself, is
reached long before, except on a machine without any to spare."""
GRACE_S = 0.1
"""Time for a process that has died by itself to end with its own exit code."""


class Helper:
    """The helper process, started with its first job and again after it has died.

    All calls must come from greenlets of one thread.
    """

    def __init__(self, model_dir: Path, template: ChatTemplateSource | None) -> None:
        self._setup = Setup(str(model_dir), template)
        self._turn = BoundedSemaphore(1)
        self._process: _Process | None = None
        self._kept: OrderedDict[bytes, StructuredOutputsParams] = OrderedDict()

    def grammar(
        self, form: StructuredOutputsParams, eos_token_ids: tuple[int, ...]
    ) -> StructuredOutputsParams:
        """Return the constraint as a grammar that the engine can compile.

        Raises RequestError if it is wrong or too complex, and what `_perform` raises.
        """
        key = msgspec.msgpack.encode(form)
        if len(key) > 4 * GRAMMAR.maximum:
            raise RequestError(FIELD, f"is longer than {GRAMMAR.maximum} characters")
        kept = self._kept.get(key)
        if kept is None:
            text = self._perform(Compile(form, eos_token_ids), FIELD)
            kept = self._kept[key] = StructuredOutputsParams(grammar=text)
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return kept

    def render(self, job: Render) -> str:
        """Return the prompt of a conversation.

        Raises RequestError if the template rejects it, and what `_perform` raises.
        """
        return self._perform(job, "messages")

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.end()
            self._process = None

    def _perform(self, job: Job, field: str) -> str:
        """Perform a job after those before it.

        Raises RequestError for `field` if the process refuses the job or dies of it, and
        OverloadedError if there was no time for it.
        """
        try:
            late = OverloadedError("the server has no time to prepare the request")
            with gevent.Timeout(MAX_WAIT_S, late), self._turn:
                reply = self._ask(job, field)
        except RecursionError:
            raise RequestError(field, "is nested too deeply") from None
        if isinstance(reply, Refused):
            raise RequestError(reply.field, reply.message)
        return reply.text

    def _ask(self, job: Job, field: str) -> Reply:
        if self._process is None:
            self._process = _Process(self._setup)
        process = self._process
        try:
            return process.ask(job)
        except (EOFError, OSError):
            code = process.end()
            self._process = None
            logger.warning("helper=died code=%d job=%s", code, type(job).__name__)
            raise _error_of(code, field) from None
        except BaseException:  # the connection would be out of step
            self.close()
            raise


class _Process:
    """One helper process and the connection to it."""

    def __init__(self, setup: Setup) -> None:
        self._socket, theirs = gevent.socket.socketpair()
        command = python_command("container.isolation.process")
        with theirs:
            # gevent's subprocess would fork in Python, which runs the hooks that libraries have for
            # a fork. OpenTelemetry's switches greenlets: the child would run the worker's loop.
            self._pid = os.posix_spawn(
                command[0],
                command,
                os.environ,
                file_actions=[(os.POSIX_SPAWN_DUP2, theirs.fileno(), 0)],
                setsid=True,
            )
        self._stream = self._socket.makefile("rb")
        write_frame(self._socket.sendall, setup)

    def ask(self, job: Job) -> Reply:
        """Send a job and wait for the reply. Raises EOFError or OSError if the process dies."""
        write_frame(self._socket.sendall, job)
        return msgspec.msgpack.decode(read_frame(self._stream), type=Reply)

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
    if code >= 0:
        return LongshoreError(f"the helper process ended with exit code {code}")
    if -code == signal.SIGPROF:
        return RequestError(field, "takes too long to prepare; make it smaller or simpler")
    name = signal.Signals(-code).name
    return RequestError(field, f"is too complex or nested too deeply ({name} while preparing it)")
