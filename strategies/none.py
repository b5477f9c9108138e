"""No batching: one request at a time, in order."""

from __future__ import annotations

from collections.abc import Iterator

from strategies.base import ReservingStrategy
from strategies.factory import StrategySettings
from strategies.group import SequenceGroup
from strategies.memory.slots import SlotMemory


class NoneStrategy(ReservingStrategy):
    """Starts the next request when the one before it has ended."""

    def _admissible(self, now: float) -> Iterator[SequenceGroup]:
        return self._reserved(0 if self.running else 1)


def make(settings: StrategySettings) -> NoneStrategy:
    memory = SlotMemory(settings.num_blocks, settings.block_size)
    return NoneStrategy(memory, settings.limits)
