"""From a plan to the tensors of its forward pass."""

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
NOWHERE: Mapping[int, int] = {}
Fill = Callable[[Tensor, Tensor], None]
"""Writes tokens in flight among the ids [T] of a step, out of those that the one before sampled."""


@dataclass(frozen=True, slots=True)
class Scored:
    """The rows of prompts whose logits score the token after them."""

    rows: Tensor
    """[R] int64: which of the T tokens."""
    next_tokens: Tensor
    """[R] int64: the token after each."""
    chunks: tuple[Chunk, ...]
    """Whose rows they are, one after the other, `len(chunk.scored)` each."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One flat row of T tokens: those of sequences that decode, then the others' chunks."""

    tokens: Tensor
    """[3, T] int64: ids, positions and slots."""
    sampled_rows: Tensor
    """[S] int64: which of the T tokens the next ones are sampled after."""
    batch: PagedBatch
    sampled: tuple[Chunk, ...]
    """The chunk of each of the S rows."""
    scored: Scored | None = None
    adapter_slots: Tensor | None = None
    """[T] int64: the slot of each token's adapter, NO_ADAPTER without; None where none has one."""

    @property
    def logit_rows(self) -> Tensor:
        """[S + R] int64: which of the T tokens have logits."""
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
        """[S] int64: the token that each sampled one follows."""
        return self.tokens[0].index_select(0, self.sampled_rows)


class InputBuilder:
    """Makes the inputs of step after step. Keeps the block tables of the step before as arrays."""

    def __init__(self, block_size: int, staging: Staging) -> None:
        self._block_size = block_size
        self._staging = staging
        self._tables: dict[int, tuple[tuple[int, ...], NDArray[np.int32]]] = {}

    def build(
        self,
        plan: StepPlan,
        *,
        newest: Tensor | None = None,
        newest_rows: Mapping[int, int] = NOWHERE,
        num_rows: int = 0,
    ) -> StepInputs:
        """newest: [N'] int64, tokens that the step before sampled; newest_rows: by sequence id,
        where in it. Chunks that end in flight take their last token from there, on the device.

        num_rows: rows of padding are added up to that many, in a step of decodes alone.
        """
        chunks = sorted(plan.chunks, key=lambda chunk: chunk.length > 1)  # stable: decodes first
        num_decodes = sum(chunk.length == 1 for chunk in chunks)
        padding = max(0, num_rows - len(chunks))
        assert not padding or num_decodes == len(chunks), "only decodes are padded"
        in_front = num_decodes + padding
        ends = np.cumsum([chunk.length for chunk in chunks] + [1] * padding).tolist()
        contexts = [chunk.end for chunk in chunks] + [0] * padding
        parcel = Parcel(self._staging)
        tokens = parcel.put(self._tokens(chunks, num_decodes, padding))
        sampled_rows = parcel.put(_sampled_rows(chunks, ends))
        scored = parcel.put(_scored_rows(chunks, ends))
        context_lens = parcel.put(np.array(contexts, np.int32))
        query_starts = [end - in_front for end in (in_front, *ends[in_front:])]
        starts = parcel.put(np.array(query_starts, np.int32))
        tables = parcel.put(self._block_tables(chunks, padding))
        adapter_slots = _adapter_slots(chunks, padding, parcel)
        fill = _plan_late_tokens(chunks, ends, newest_rows, parcel)
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
            num_decodes=in_front,
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
        """[3, T]: token ids, positions and slots; 0 for an id that is in flight."""
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
        slots = self._table(chunk)[block].astype(int) * self._block_size + offset
        return np.stack([np.array(ids + [0] * (chunk.length - len(ids))), positions, slots])

    def _block_tables(self, chunks: Sequence[Chunk], padding: int) -> NDArray[np.int32]:
        """[N, B]: of each table what the context uses; a reserved table may be far longer."""
        used = [-(-chunk.end // self._block_size) for chunk in chunks]
        tables = np.zeros((len(chunks) + padding, max(used)), np.int32)
        for row, (chunk, count) in enumerate(zip(chunks, used, strict=True)):
            tables[row, :count] = self._table(chunk)[:count]
        self._tables = {chunk.sequence.id: (chunk.blocks, self._table(chunk)) for chunk in chunks}
        return tables

    def _table(self, chunk: Chunk) -> NDArray[np.int32]:
        """Made anew only when the table has changed: once in `block_size` tokens."""
        known = self._tables.get(chunk.sequence.id)
        if known is not None and known[0] is chunk.blocks:
            return known[1]
        table = np.array(chunk.blocks, np.int32)
        self._tables[chunk.sequence.id] = chunk.blocks, table
        return table


def _plan_late_tokens(
    chunks: Sequence[Chunk], ends: Sequence[int], newest_rows: Mapping[int, int], parcel: Parcel
) -> Fill | None:
    """None where no token is in flight."""
    late = [
        (end - 1, newest_rows[chunk.sequence.id])
        for chunk, end in zip(chunks, ends, strict=False)
        if chunk.ends_in_flight
    ]
    if not late:
        return None
    places, rows = (parcel.put(np.array(each, int)) for each in zip(*late, strict=True))

    def fill(ids: Tensor, newest: Tensor) -> None:
        ids.index_copy_(0, places(), newest.index_select(0, rows()))

    return fill


def _adapter_slots(chunks: Sequence[Chunk], padding: int, parcel: Parcel) -> Sent | None:
    """None where no sequence has an adapter."""
    if not any(chunk.sequence.adapter for chunk in chunks):
        return None
    adapters = [chunk.sequence.adapter for chunk in chunks]
    slots = [each.slot if each else NO_ADAPTER for each in adapters] + [NO_ADAPTER] * padding
    lengths = [chunk.length for chunk in chunks] + [1] * padding
    return parcel.put(np.repeat(np.array(slots, int), lengths))


def _sampled_rows(chunks: Sequence[Chunk], ends: Sequence[int]) -> NDArray[np.int64]:
    rows = [end - 1 for chunk, end in zip(chunks, ends, strict=False) if chunk.samples]
    return np.array(rows, int)


def _scored_rows(chunks: Sequence[Chunk], ends: Sequence[int]) -> NDArray[np.int64]:
    """[2, R]: the rows that score the prompt token after them, and that token."""
    pairs = [
        (end - chunk.end + position, chunk.sequence.token_ids[position + 1])
        for chunk, end in zip(chunks, ends, strict=False)
        for position in chunk.scored
    ]
    return np.array(pairs, int).reshape(-1, 2).T


def _scored(chunks: Sequence[Chunk], rows: Tensor) -> Scored | None:
    scoring = tuple(chunk for chunk in chunks if chunk.scored)
    return Scored(rows[0], rows[1], scoring) if scoring else None
