"""Helps a process to end with its parent or at a signal, and to limit what its jobs use."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from core.errors import StoppedError

_PR_SET_PDEATHSIG = 1
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_CLEAN_UP_S = 3
"""Time for the clean-up of a process that is stopped while it starts."""


def num_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, however it ends.

    The child calls this itself. parent: the parent's process id. If the parent has already ended,
    the kernel sends no signal, so the child kills itself.

    NOTE: to the kernel, the parent is the thread that started the child. When that thread ends, the
    kernel kills the child, even if the parent's process lives on. Does nothing outside Linux.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def until_stopped(run: Callable[[], int]) -> int:
    """Run a server and return its exit code, or 0 if SIGINT or SIGTERM stops it while it starts.

    The signal raises StoppedError in the main thread until `run` handles signals itself. Call this
    before anything slow: a process without a handler ignores these signals if it is process 1, as
    in a container.

    The process ends at once at a second signal, and if the clean-up takes too long: a library may
    wait for its threads, or lose the exception.
    """
    code = 0

    def end(*_: object) -> NoReturn:
        os._exit(code)

    def stop(*_: object) -> NoReturn:
        _handle_signals(end)
        signal.signal(signal.SIGALRM, end)
        signal.alarm(_CLEAN_UP_S)
        raise StoppedError

    _handle_signals(stop)
    try:
        code = run()
        _handle_signals(end)  # Python itself may wait for threads
    except StoppedError:
        print("stopped while starting", flush=True)
    return code


def note_stop_signals() -> Sequence[int]:
    """Return a list that collects SIGINT and SIGTERM, which no longer end the process.

    Call this in the main thread and poll the list. A threading.Event would not do: a signal handler
    interrupts the main thread anywhere, so it could wait forever for a lock that the main thread
    itself holds.
    """
    signals: list[int] = []

    def note(signum: int, _: object) -> None:
        signals.append(signum)

    _handle_signals(note)
    return signals


def _handle_signals(handler: Callable[[int, FrameType | None], object]) -> None:
    for signum in _STOP_SIGNALS:
        signal.signal(signum, handler)


def reap_orphans(children: Collection[int]) -> None:
    """Reap ended processes that are not our own children.

    Process 1 of a container inherits the processes whose parents have ended.
    """
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, options)) and ended.si_pid not in children:
            os.waitpid(ended.si_pid, 0)


@contextmanager
def cpu_limit(seconds: float) -> Generator[None]:
    """Have SIGPROF end the process if its `with` block uses up this much CPU time."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def limit_memory(num_bytes: int) -> None:
    """Limit the address space to its current size plus `num_bytes`."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + num_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
