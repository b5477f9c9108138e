"""What a start spends its time on."""

from __future__ import annotations

import time


class Phases:
    """Seconds of each part of a start, by name, in order."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def end(self, name: str) -> None:
        """The part that began when the one before ended is over."""
        now = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now
