"""Times the phases of start-up. This is a file of its own, since it must not import torch."""

from __future__ import annotations

import time
from collections.abc import Callable


class Phases:
    """Durations in seconds of the phases of start-up, by name, in order."""

    def __init__(self, report: Callable[[str, float], object] = lambda name, seconds: None) -> None:
        """report: called with the name and the seconds of each phase when it ends."""
        self._report = report
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def end(self, name: str) -> None:
        """End the current phase, which began when the previous one ended."""
        now = time.monotonic()
        seconds = now - self._last
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self._report(name, seconds)
        self._last = now
