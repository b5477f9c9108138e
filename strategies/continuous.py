"""Continuous batching: sequences join and leave the batch between any two steps.

The iteration-level scheduling of Orca (OSDI 2022), with its memory: one contiguous run of blocks
per sequence, reserved at admission. `option.kv_reservation` says how many tokens to reserve
(`core.configuration.sizing.reserved_tokens`). The names are from the PagedAttention paper, section
6.1:

max      max_model_len for every request, as in a server that cannot know the length
pow2     the prompt, plus max_tokens rounded up to a power of two
oracle   the prompt plus max_tokens; this is the true length when requests set `ignore_eos`
"""

from __future__ import annotations

from collections.abc import Iterator

from core.configuration.sizing import reserved_tokens
from core.configuration.strategy_table import KVReservation
from core.sequence import Sequence
from strategies.base import Limits, ReservingStrategy, num_places
from strategies.group import SequenceGroup
from strategies.memory.base import KVMemory


class ContinuousStrategy(ReservingStrategy):
    """Admits while a batch slot is free and the reservation of the oldest waiting request fits."""

    def __init__(
        self, memory: KVMemory, limits: Limits, reservation: KVReservation, max_model_len: int
    ) -> None:
        super().__init__(memory, limits)
        self.reservation: KVReservation = reservation
        self.max_model_len = max_model_len

    def _admissible(self, now: float) -> Iterator[SequenceGroup]:
        if not self.waiting:
            return iter(())
        return self._reserved(self.limits.max_sequences - num_places(self.memory, self.running))

    def _reservation(self, sequence: Sequence) -> int:
        return reserved_tokens(
            self.reservation,
            sequence.num_prompt_tokens,
            sequence.params.max_tokens,
            self.max_model_len,
        )
