"""How long the engine has been silent, counted only while its messages could be read."""

from __future__ import annotations

from collections.abc import Callable

MAX_PAUSE_S = 0.5
"""The most time that counts as silence between two readings. If more time passes, this process was
held up, and messages that the engine sent meanwhile may still be on their way."""


class Silence:
    """Counts seconds of silence. Not thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.heard()

    def heard(self) -> None:
        """Start again at zero: a message has been read."""
        self.seconds = 0.0
        self._read_at = self._clock()

    def listened(self) -> None:
        """Count the time since the last reading: no message waits to be read."""
        now = self._clock()
        self.seconds += min(now - self._read_at, MAX_PAUSE_S)
        self._read_at = now
