"""Paged batching: continuous batching whose sequences take KV blocks as they need them.

PagedAttention and the scheduler of vLLM (SOSP 2023, sections 4.3 and 4.5): first come, first
served; when blocks run out, the newest running sequence gives back all of its blocks and is
computed again later from the tokens it has (preemption by recomputation).
"""

from __future__ import annotations

from core.plan import Chunk
from core.sequence import Sequence
from strategies.base import Limits, Strategy
from strategies.memory.base import KVMemory


class PagedStrategy(Strategy):
    """Running sequences go first, oldest first; what budget and blocks are left admits new ones."""

    def __init__(self, memory: KVMemory, limits: Limits) -> None:
        super().__init__(memory, limits)
        self.num_preemptions = 0

    def _next_chunks(self, now: float) -> list[Chunk]:
        chunks = self._continue_running()
        return chunks + self._admit(self.limits.max_step_tokens - sum(c.length for c in chunks))

    def _continue_running(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        budget = self.limits.max_step_tokens
        # Preemption takes from the end of `running`, so it never reaches one already passed.
        place = 0
        while budget > 0 and place < len(self.running):
            sequence = self.running[place]
            length = min(sequence.num_pending_tokens, budget)
            if length > 0 and self._take_blocks(sequence, length):
                chunks.append(self._chunk(sequence, length))
                budget -= length
            place += 1
        return chunks

    def _take_blocks(self, sequence: Sequence, length: int) -> bool:
        """Blocks for the next tokens, if need be from newer sequences; False: preempted itself."""
        while not self.memory.grow(sequence.id, sequence.num_computed_tokens + length):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.memory.release(sequence.id)
        sequence.num_computed_tokens = 0
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _admit(self, budget: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        while self.waiting and budget > 0 and len(self.running) < self.limits.max_sequences:
            sequence = self.waiting[0]
            length = min(sequence.num_pending_tokens, budget)
            if length == 0 or not self._has_room_for(sequence):
                break
            self.memory.grow(sequence.id, length)
            self.running.append(self.waiting.popleft())
            chunks.append(self._chunk(sequence, length))
            budget -= length
        return chunks

    def _has_room_for(self, sequence: Sequence) -> bool:
        """Whether all its tokens fit, and a block more for each that runs.

        Without that reserve, the next step would preempt what this one admits.
        """
        num_needed = self.memory.blocks_for(sequence.num_tokens) + len(self.running)
        return num_needed <= self.memory.num_free_blocks
