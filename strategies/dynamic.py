"""Dynamic batching: requests are collected into a batch, which runs until its last member ends.

The request-level batching of DJL Serving, Triton Inference Server and TorchServe. Each request is
answered as soon as it ends, but its batch slot stays empty until the whole batch has ended.
"""

from __future__ import annotations

from collections.abc import Iterator

from strategies.base import Limits, ReservingStrategy
from strategies.group import SequenceGroup
from strategies.memory.base import KVMemory


class DynamicStrategy(ReservingStrategy):
    """Starts a batch once `max_sequences` requests wait, or the oldest has waited `max_delay_s`."""

    def __init__(self, memory: KVMemory, limits: Limits, max_delay_s: float) -> None:
        super().__init__(memory, limits)
        self.max_delay_s = max_delay_s

    def _admissible(self, now: float) -> Iterator[SequenceGroup]:
        if self.running:
            return self._reserved(0)
        if not self._is_full() and not self._is_overdue(now):
            self.blocked_by = "batch"
            return iter(())
        return self._reserved(self.limits.max_sequences)

    def wake_at(self) -> float | None:
        return None if self.running or not self.waiting else self._deadline()

    def _is_full(self) -> bool:
        return len(self.waiting) >= self.limits.max_sequences

    def _is_overdue(self, now: float) -> bool:
        return bool(self.waiting) and now >= self._deadline()

    def _deadline(self) -> float:
        # More urgent requests may have overtaken the oldest one.
        return min(group.request.arrival for group in self.waiting) + self.max_delay_s
