"""Times the phases of a start. Apart from the rest: it must load before torch does."""

from __future__ import annotations

import time


class Phases:
    """Durations in seconds of the phases of a start, by name, in order."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def end(self, name: str) -> None:
        """End the phase that began when the one before ended."""
        now = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now
