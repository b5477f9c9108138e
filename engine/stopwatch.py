"""Adds up the time spent in parts of the engine's loop."""

from __future__ import annotations

import time
from collections.abc import Callable


class Stopwatch:
    """Runs within `with` blocks, which must not be nested. Each costs two readings of the clock."""

    __slots__ = ("_begin", "_clock", "_total")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._total = 0.0
        self._begin: float | None = None

    def __enter__(self) -> None:
        self._begin = self._clock()

    def __exit__(self, *error: object) -> None:
        assert self._begin is not None
        self._total += self._clock() - self._begin
        self._begin = None

    @property
    def seconds(self) -> float:
        """All time so far, including that of a block that has not ended."""
        return self._total + (0.0 if self._begin is None else self._clock() - self._begin)
