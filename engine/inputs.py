"""Builds the input tensors of a forward pass from a step's plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.plan import Chunk, StepPlan
from engine.staging import Parcel, Sent, Staging
from kernels.batch import PagedBatch

PADDING_SLOT = -1
NO_ADAPTER = -1
NO_ROWS: Mapping[int, int] = {}
Fill = Callable[[Tensor, Tensor], None]
"""Fills the tokens in flight into a step's ids [T], from the tokens [N'] sampled before it."""


@dataclass(frozen=True, slots=True)
class Scored:
    """The R prompt tokens whose logits score the token that follows each (`prompt_logprobs`)."""

    rows: Tensor
    """[R] int64: their indices among the step's T tokens."""
    next_tokens: Tensor
    """[R] int64: the token after each."""
    chunks: tuple[Chunk, ...]
    """The chunks of these rows in order; each has `len(chunk.scored)` rows."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step's T tokens, without padding between sequences: decodes first, then longer chunks."""

    tokens: Tensor
    """[3, T] int64: token ids, positions and the slot mapping."""
    sampled_rows: Tensor
    """[S] int64: indices of the tokens whose logits are sampled from."""
    batch: PagedBatch
    sampled: tuple[Chunk, ...]
    """The chunk of each of the S rows."""
    scored: Scored | None = None
    adapter_slots: Tensor | None = None
    """[T] int64: each token's adapter slot or NO_ADAPTER. None if no token has an adapter."""

    @property
    def logit_rows(self) -> Tensor:
        """[S + R] int64: indices of the tokens that need logits."""
        if self.scored is None:
            return self.sampled_rows
        return torch.cat([self.sampled_rows, self.scored.rows])

    @property
    def input_ids(self) -> Tensor:
        """[1, T]."""
        return self.tokens[0:1]

    @property
    def position_ids(self) -> Tensor:
        """[1, T]."""
        return self.tokens[1:2]

    def newest(self) -> Tensor:
        """Return [S] int64: the input token of each sampled row."""
        return self.tokens[0].index_select(0, self.sampled_rows)


class InputBuilder:
    """Builds the inputs of each step. Keeps the block tables of the previous step."""

    def __init__(self, block_size: int, staging: Staging) -> None:
        self._block_size = block_size
        self._staging = staging
        self._rows: list[tuple[tuple[int, ...], int]] = []
        """For each row of the previous step: its block table, and how many blocks it used."""
        self._matrix = np.zeros((0, 0), np.int32)
        """[N, B]: all block tables of the previous step."""

    def build(
        self,
        plan: StepPlan,
        *,
        newest: Tensor | None = None,
        newest_rows: Mapping[int, int] = NO_ROWS,
        num_rows: int = 0,
    ) -> StepInputs:
        """Start copying the inputs to the device. Does not wait.

        newest: [N'] int64, the tokens sampled by the previous step; newest_rows: indices into it by
        sequence id. If the last token of a chunk is in flight, the device copies it from there.

        num_rows: pad a step of decodes to this many rows. Ignored if the step is larger.
        """
        chunks = sorted(plan.chunks, key=lambda chunk: chunk.length > 1)  # decodes first; stable
        num_decodes = sum(chunk.length == 1 for chunk in chunks)
        padding = max(0, num_rows - len(chunks))
        assert not padding or num_decodes == len(chunks), "only a step of decodes is padded"
        first_prefill = num_decodes + padding
        ends = np.cumsum([chunk.length for chunk in chunks] + [1] * padding).tolist()
        contexts = [chunk.end for chunk in chunks] + [0] * padding
        parcel = Parcel(self._staging)
        tokens = parcel.put(self._tokens(chunks, num_decodes, padding))
        sampled_rows = parcel.put(_sampled_rows(chunks, ends))
        scored = parcel.put(_scored_rows(chunks, ends))
        context_lens = parcel.put(np.array(contexts, np.int32))
        query_starts = [end - first_prefill for end in (first_prefill, *ends[first_prefill:])]
        starts = parcel.put(np.array(query_starts, np.int32))
        tables = parcel.put(self._block_tables(chunks, padding))
        adapter_slots = _adapter_slots(chunks, padding, parcel)
        fill = _plan_fill(chunks, ends, newest_rows, parcel)
        parcel.send()
        if fill is not None:
            assert newest is not None
            fill(tokens()[0], newest)
        batch = PagedBatch(
            query_starts=starts(),
            context_lens=context_lens(),
            block_tables=tables(),
            slot_mapping=tokens()[2],
            spans=tuple(zip([0, *ends], ends, contexts, strict=False)),
            num_decodes=first_prefill,
        )
        return StepInputs(
            tokens(),
            sampled_rows(),
            batch,
            tuple(chunk for chunk in chunks if chunk.samples),
            _scored(chunks, scored()),
            adapter_slots() if adapter_slots is not None else None,
        )

    def _tokens(self, chunks: Sequence[Chunk], num_decodes: int, padding: int) -> NDArray[np.int64]:
        """Return [3, T]: ids, positions and slots. The id of a token in flight is 0."""
        columns = [self._decode_columns(chunks[:num_decodes])]
        columns += [np.array([[0], [0], [PADDING_SLOT]]).repeat(padding, 1)]
        columns += [self._columns(chunk) for chunk in chunks[num_decodes:]]
        return np.concatenate(columns, 1)

    def _decode_columns(self, chunks: Sequence[Chunk]) -> NDArray[np.int64]:
        ids = [0 if c.ends_in_flight else c.sequence.token_ids[c.start] for c in chunks]
        positions = np.array([chunk.start for chunk in chunks], int)
        blocks = np.array([c.blocks[c.start // self._block_size] for c in chunks], int)
        slots = blocks * self._block_size + positions % self._block_size
        return np.stack([np.array(ids, int), positions, slots])

    def _columns(self, chunk: Chunk) -> NDArray[np.int64]:
        ids = chunk.sequence.token_ids[chunk.start : chunk.end]
        positions = np.arange(chunk.start, chunk.end)
        block, offset = np.divmod(positions, self._block_size)
        slots = np.array(chunk.blocks, int)[block] * self._block_size + offset
        return np.stack([np.array(ids + [0] * (chunk.length - len(ids))), positions, slots])

    def _block_tables(self, chunks: Sequence[Chunk], padding: int) -> NDArray[np.int32]:
        """Return [N, B]: the block tables, cut to the blocks that the contexts use.

        A sequence with reserved blocks may have a much longer table.
        """
        rows = [(chunk.blocks, -(-chunk.end // self._block_size)) for chunk in chunks]
        tables = np.zeros((len(rows) + padding, max(count for _, count in rows)), np.int32)
        # Most rows of a decode step equal those of the previous step.
        num_old = min(len(rows), len(self._rows))
        width = min(tables.shape[1], self._matrix.shape[1])
        tables[:num_old, :width] = self._matrix[:num_old, :width]
        for index, (blocks, count) in enumerate(rows):
            if index < num_old:
                old_blocks, old_count = self._rows[index]
                if old_blocks is blocks and old_count == count:
                    continue
                tables[index] = 0
            tables[index, :count] = blocks[:count]
        self._rows, self._matrix = rows, tables
        return tables


def _plan_fill(
    chunks: Sequence[Chunk], ends: Sequence[int], newest_rows: Mapping[int, int], parcel: Parcel
) -> Fill | None:
    """Plan how to fill in the tokens in flight. Return None if there are none."""
    in_flight = [
        (end - 1, newest_rows[chunk.sequence.id])
        for chunk, end in zip(chunks, ends, strict=False)
        if chunk.ends_in_flight
    ]
    if not in_flight:
        return None
    targets, rows = (parcel.put(np.array(column, int)) for column in zip(*in_flight, strict=True))

    def fill(ids: Tensor, newest: Tensor) -> None:
        ids.index_copy_(0, targets(), newest.index_select(0, rows()))

    return fill


def _adapter_slots(chunks: Sequence[Chunk], padding: int, parcel: Parcel) -> Sent | None:
    """Return [T] int64 slots, or None if no sequence has an adapter."""
    if not any(chunk.sequence.adapter for chunk in chunks):
        return None
    adapters = [chunk.sequence.adapter for chunk in chunks]
    slots = [adapter.slot if adapter else NO_ADAPTER for adapter in adapters]
    slots += [NO_ADAPTER] * padding
    lengths = [chunk.length for chunk in chunks] + [1] * padding
    return parcel.put(np.repeat(np.array(slots, int), lengths))


def _sampled_rows(chunks: Sequence[Chunk], ends: Sequence[int]) -> NDArray[np.int64]:
    rows = [end - 1 for chunk, end in zip(chunks, ends, strict=False) if chunk.samples]
    return np.array(rows, int)


def _scored_rows(chunks: Sequence[Chunk], ends: Sequence[int]) -> NDArray[np.int64]:
    """Return [2, R]: the scored rows and the prompt token after each."""
    pairs = [
        (end - chunk.end + position, chunk.sequence.token_ids[position + 1])
        for chunk, end in zip(chunks, ends, strict=False)
        for position in chunk.scored
    ]
    return np.array(pairs, int).reshape(-1, 2).T


def _scored(chunks: Sequence[Chunk], rows: Tensor) -> Scored | None:
    scoring = tuple(chunk for chunk in chunks if chunk.scored)
    return Scored(rows[0], rows[1], scoring) if scoring else None
