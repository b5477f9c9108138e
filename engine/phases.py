"""Times the phases of start-up. In a file of its own, since it must not import torch."""

from __future__ import annotations

import time


class Phases:
    """Durations in seconds of the phases of start-up, by name, in order."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def end(self, name: str) -> None:
        """End the current phase, which began when the previous one ended."""
        now = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now
