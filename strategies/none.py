"""No batching: one request at a time, in order."""

from __future__ import annotations

from collections.abc import Iterator

from strategies.base import ReservingStrategy
from strategies.group import SequenceGroup


class NoneStrategy(ReservingStrategy):
    """Starts the next request when the one before it has ended."""

    def _admissible(self, now: float) -> Iterator[SequenceGroup]:
        return self._reserved(0 if self.running else 1)
