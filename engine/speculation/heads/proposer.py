"""Drafts of a head, in the loop of a draft model."""

from __future__ import annotations

from typing import ClassVar

from core.plan import Chunk
from core.sequence import Sequence
from engine.speculation.draft_model import DraftLookup, DraftModel, DraftSettings
from engine.speculation.heads.head import Head, HeadChunk
from strategies.memory.base import KVMemory


class HeadProposer(DraftModel):
    """Reads tokens from the second one on, each with the state of the one before."""

    def __init__(self, head: Head, model_memory: KVMemory, settings: DraftSettings) -> None:
        """model_memory: of the model, whose tables tell where states are."""
        super().__init__(settings)
        self._head = head
        self._model_memory = model_memory

    def _make_lookup(self, sequence: Sequence) -> DraftLookup:
        return HeadLookup(sequence, self.longest)

    def _can_read(self, lookup: DraftLookup) -> bool:
        """Whether no move has still to bring the states: then the next step will find them."""
        memory, states = self._model_memory, self._head.states
        moves = [*memory.copies, *memory.swap_ins]
        if not moves:
            return True
        assert states is not None, "the model keeps its states"
        blocks = memory.tables(lookup.sequence.id)[states.index].blocks
        return {block for _, block in moves}.isdisjoint(
            blocks[lookup.num_read // states.group.block_size :]
        )

    def _chunk(self, lookup: DraftLookup, length: int) -> Chunk:
        plain = super()._chunk(lookup, length)
        id, states = plain.sequence.id, self._head.states
        is_draft = plain.start >= lookup.num_known
        assert states is not None, "the model keeps its states"
        if is_draft:
            rows = (self._head.rows[id],)
        else:
            slots = states.slots(self._model_memory.tables(id), plain.start, plain.end)
            rows = tuple(slots.tolist())
        return HeadChunk(
            sequence=plain.sequence,
            start=plain.start,
            length=length,
            tables=plain.tables,
            samples_token=plain.samples_token,
            rows=rows,
            is_draft=is_draft,
        )


class HeadLookup(DraftLookup):
    num_skipped: ClassVar[int] = 1

    def __init__(self, sequence: Sequence, longest: int) -> None:
        super().__init__(sequence, longest)
        # K and V of the first token that is read depend on the token before it.
        self.sequence.prefix_salt += f"|{sequence.token_ids[0]}"

    def catch_up(self) -> int:
        """As in a draft model; but drafts were read without their states, which are known now."""
        self.num_read = min(self.num_read, self.num_known)
        return super().catch_up()
