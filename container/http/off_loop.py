"""Runs long work in threads, so that the other requests of the worker do not wait for it.

Threads share the interpreter lock. A thread that runs Python code releases it every
`SWITCH_INTERVAL_S`, but a single call into C may hold the lock until it returns. So each such call
has to be short, which the limits on a request's size ensure (`core/configuration/limits.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

import gevent

from core.foreign_code import contained

T = TypeVar("T")

SWITCH_INTERVAL_S = 0.001
"""For `sys.setswitchinterval` in a worker; Python's own 5 ms would add up over several threads."""
LONG_TEXT_CHARACTERS = 4096
"""Longer text is tokenized in a thread. Tokenizing takes 1 µs for each character."""
LONG_BODY_BYTES = 2**16
"""A longer body is parsed and checked in a thread. A shorter one takes at most some 10 ms."""
_TURN_S = 0.01


def in_thread_if_long(work: Callable[[], T], *, size: int, long: int = LONG_TEXT_CHARACTERS) -> T:
    """Call `work`, in gevent's thread pool if `size` exceeds `long`. Raises what it raises."""
    if size > long:
        return _in_thread(work)
    with contained:
        return work()


def _in_thread(work: Callable[[], T]) -> T:
    outcome = _Outcome[T]()
    gevent.get_hub().threadpool.apply(outcome.fill, (work,))
    if outcome.error is not None:
        raise outcome.error
    return outcome.values[0]


class _Outcome(Generic[T]):
    """The result or the error of a call. The pool itself would print the error's traceback."""

    def __init__(self) -> None:
        self.values: list[T] = []
        self.error: Exception | None = None

    def fill(self, work: Callable[[], T]) -> None:
        try:
            with contained:
                self.values.append(work())
        except Exception as error:
            self.error = error


class Turns:
    """Lets other requests run during a long loop in a greenlet."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def give(self) -> None:
        """Let other greenlets run if this one has run for 10 ms."""
        if time.monotonic() - self._began >= _TURN_S:
            gevent.sleep(0)
            self._began = time.monotonic()
