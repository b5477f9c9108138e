"""When a worker process has so much to do that there should be another."""

from __future__ import annotations

import time
from collections.abc import Callable

PERIOD_S = 10.0
BUSY_SHARE = 0.7
"""Of a core. A worker that uses more has the streams of tens of thousands of tokens per second, or
many hundreds of requests per second."""


class CoreUse:
    """Measures which share of a core this process uses."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._began, self._cpu_began_s = clock(), cpu_clock()

    def is_high(self) -> bool:
        """Whether a period has ended in which the process was busy. Call it often."""
        seconds = self._clock() - self._began
        if seconds < PERIOD_S:
            return False
        cpu_s = self._cpu_clock() - self._cpu_began_s
        self._began, self._cpu_began_s = self._clock(), self._cpu_clock()
        return cpu_s > BUSY_SHARE * seconds
