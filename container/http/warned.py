"""The warnings that a worker has logged. Clients repeat their mistakes; the log should not."""

from __future__ import annotations

WARNED = "longshore-warned"
"""The key of an app's `Warned` in `Flask.extensions`."""
MAX_REMEMBERED = 1000


class Warned:
    """A set of warnings. Once it is full, no warning is new: clients choose the fields' names."""

    def __init__(self) -> None:
        self._warnings: set[str] = set()

    def add(self, warning: str) -> bool:
        """Return whether the warning is new, and remember it."""
        if warning in self._warnings or len(self._warnings) == MAX_REMEMBERED:
            return False
        self._warnings.add(warning)
        return True
