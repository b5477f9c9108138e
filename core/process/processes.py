"""Helps a process to end with its parent or at a signal, and to limit what its jobs use."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

_PR_SET_PDEATHSIG = 1


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


def note_stop_signals() -> Sequence[int]:
    """Return a list that collects SIGINT and SIGTERM, which no longer end the process.

    Call this in the main thread and poll the list. A threading.Event would not do: a signal handler
    interrupts the main thread anywhere, so it could wait forever for a lock that the main thread
    itself holds.
    """
    signals: list[int] = []
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda number, frame: signals.append(number))
    return signals


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
