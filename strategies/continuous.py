"""Continuous batching: sequences join and leave between any two steps.

The iteration-level scheduling of Orca (OSDI 2022), with its memory: one contiguous run of blocks
per sequence, reserved when it is admitted. How much is reserved is the policy (the names are the
PagedAttention paper's, section 6.1):

max      the longest possible sequence, whatever the request; what a server without knowledge does
pow2     the prompt, and the next power of two of the tokens that may be generated
oracle   exactly the tokens it may use; the true length when requests set `ignore_eos`
"""

from __future__ import annotations

from collections.abc import Iterator

from core.options import KVReservation
from core.sequence import Sequence
from strategies.base import Limits, ReservingStrategy
from strategies.group import SequenceGroup
from strategies.memory.base import KVMemory


class ContinuousStrategy(ReservingStrategy):
    """Admits while a slot is free and the reservation of the oldest waiting request fits."""

    def __init__(
        self, memory: KVMemory, limits: Limits, reservation: KVReservation, max_model_len: int
    ) -> None:
        super().__init__(memory, limits)
        self.reservation: KVReservation = reservation
        self.max_model_len = max_model_len

    def _admissible(self, now: float) -> Iterator[SequenceGroup]:
        return self._reserved(self.limits.max_sequences - self.num_running)

    def _reservation(self, sequence: Sequence) -> int:
        if self.reservation == "max":
            return self.max_model_len
        if self.reservation == "oracle":
            return sequence.max_length
        power_of_two = 1 << (sequence.params.max_tokens - 1).bit_length()
        return min(sequence.num_prompt_tokens + power_of_two, self.max_model_len)
