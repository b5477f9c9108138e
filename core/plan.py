"""The data of one step: the plan of a strategy, and the result of an executor.

There is no prefill phase and no decode phase, only tokens whose K/V are not computed yet. A prompt
is a long chunk, a decode step is a chunk of one token, a chunked prefill is several chunks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from core.part import NO_ROWS
from core.sampling import ChunkResult
from core.sequence import Sequence


class BlockTable(NamedTuple):
    """A sequence's blocks in one cache group: position p is in `blocks[p // block_size]`."""

    blocks: tuple[int, ...] = ()
    first: int = 0
    """The entries before this one are stale: their blocks left the window, and are not read."""

    @property
    def held(self) -> tuple[int, ...]:
        return self.blocks[self.first :]


class StateSlots(NamedTuple):
    """Where the layers with a state find a sequence's states, and where they leave them.

    They may differ, so that sequences share a state and no step needs a copy of one. -1: nowhere.
    """

    reads: int = -1
    """The slot with the state before the chunk; not read at position 0, where the state is 0."""
    writes: int = -1
    """The slot that gets the state after the chunk, or after the first of its last tokens, if there
    are more slots."""
    ahead: tuple[int, ...] = ()
    """One slot for the state after each of so many last tokens, which may be taken back."""
    kept: tuple[tuple[int, int], ...] = ()
    """Further slots that get a state on the way: after how many tokens of the chunk, and which."""

    @property
    def written(self) -> tuple[int, ...]:
        """The slots that get the states after the chunk's last tokens, in their order."""
        return (self.writes, *self.ahead)


NO_STATE = StateSlots()


class Chunk(msgspec.Struct, frozen=True):
    """Tokens `start : start + length` of a sequence, to be computed in this step.

    `tables` has the sequence's block table in each cache group. They cover every position up to
    `start + length`, and are valid until the plan is committed.

    The last token may be in flight: sampled by the previous step and so far known only to the
    device.
    """

    sequence: Sequence
    start: int
    length: int
    tables: tuple[BlockTable, ...]
    samples_token: bool
    """Whether the chunk ends at the newest token, so that the next one is sampled."""
    extra_rows: range = NO_ROWS
    """Further positions whose logits a part of the sequence wants."""
    state: StateSlots = NO_STATE

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence up to the chunk's last one."""
        return self.end

    @property
    def ends_in_flight(self) -> bool:
        """Whether the last token is still being sampled by the previous step."""
        return self.start + self.length > len(self.sequence.token_ids)


BlockPairs = tuple[tuple[int, int], ...]
"""Pairs of source and target block."""


@dataclass(frozen=True, slots=True)
class BlockMoves:
    """Whole blocks, of all layers, to move before the forward pass of a step, in this order.

    ```
    swap_outs   device ▶ host     the blocks they free may be targets of the moves below
    swap_ins    host ▶ device     the blocks they fill may be sources of copies
    copies      device ▶ device   before the forward pass writes into their targets
    ```

    Moves of one kind may run in any order, because no move uses the target of another one.
    """

    swap_outs: BlockPairs = ()
    swap_ins: BlockPairs = ()
    copies: BlockPairs = ()
    state_swap_outs: BlockPairs = ()
    """Slots of states and their places in host memory; moved like blocks."""
    state_swap_ins: BlockPairs = ()

    def __bool__(self) -> bool:
        moves_state = self.state_swap_outs or self.state_swap_ins
        return bool(self.swap_outs or self.swap_ins or self.copies or moves_state)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Block moves, then one forward pass. A sequence has at most one chunk; no chunk is empty."""

    chunks: tuple[Chunk, ...]
    moves: BlockMoves = field(default_factory=BlockMoves)
    swapped_out: tuple[Sequence, ...] = ()
    """Sequences whose blocks `moves.swap_outs` saves. If the plan fails, their K/V are lost."""

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)


StepResult = Mapping[int, ChunkResult]
"""Maps sequence ids to results, for each chunk with `samples_token` or `extra_rows`: tokens, the
reason of a failure, or what another kind of search needs."""
