"""No batching: one request at a time, in order."""

from __future__ import annotations

from collections.abc import Iterator

from core.sequence import Sequence
from strategies.base import ReservingStrategy


class NoneStrategy(ReservingStrategy):
    """The next request starts when the one before it has ended."""

    def _admissible(self, now: float) -> Iterator[Sequence]:
        return self._reserved(0 if self.running else 1)
