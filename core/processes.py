"""What every child process of the container owes its parent."""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Has the kernel kill this process once its parent ends, however it does so after this call.

    To be called by the child itself. NOTE: for the kernel the parent is the thread that started
    the child, so that must be one that lives as long as its process. Does nothing outside Linux.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
