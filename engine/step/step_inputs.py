"""Builds the input tensors of a forward pass from a step's plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.configuration.kv_layout import CacheGroup
from core.configuration.step_size import StepSize
from core.plan import Chunk, StepPlan
from engine.staging import Slot, Staging, Upload
from engine.step.block_tables import BlockTables
from engine.step.column import Applied, Column, PerToken, Repeatable
from engine.step.places import PaddedPlaces, Places
from kernels.attention.batch import PagedBatch

PADDING_SLOT = -1


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step's T tokens: decodes first, then longer chunks. Only CUDA graphs need padding."""

    tokens: Tensor
    """[2 + G, T] int64: token ids, positions and the slot mapping of each cache group."""
    sampled_rows: Tensor
    """[S] int64: indices of the tokens whose logits are sampled from. A padded step has a row for
    each of its sequences; rows past `sampled_chunks` are 0."""
    batches: tuple[PagedBatch, ...]
    """One for each of the G cache groups."""
    sampled_chunks: tuple[Chunk, ...] = ()
    """The chunk of each sampled row that is not padding."""
    columns: Sequence[Applied] = ()
    """The columns that the step uses."""

    @property
    def batch(self) -> PagedBatch:
        """The batch in the first group. Those in other groups only have other tables and slots."""
        return self.batches[0]

    @property
    def logit_rows(self) -> Tensor:
        """[S + R] int64: indices of the tokens that need logits. With R, S is not padded."""
        extra = [column.extra_rows for column in self.columns if column.extra_rows is not None]
        if not extra:
            return self.sampled_rows
        return torch.cat([self.sampled_rows[: len(self.sampled_chunks)], *extra])

    @property
    def token_ids(self) -> Tensor:
        """[T] int64."""
        return self.tokens[0]

    @property
    def positions(self) -> Tensor:
        """[T] int64."""
        return self.tokens[1]

    @property
    def per_token(self) -> dict[str, Tensor]:
        """The numbers of each column that has one for each token, [T] int64, by its name."""
        return {
            column.name: column.numbers for column in self.columns if isinstance(column, PerToken)
        }

    @property
    def repeatable(self) -> list[Repeatable]:
        """The columns that other processes must repeat."""
        columns = (column for column in self.columns if isinstance(column, Repeatable))
        return [column for column in columns if column.tensors]

    def newest(self) -> Tensor:
        """Return [S] int64: the input token of each sampled row."""
        return self.token_ids.index_select(0, self.sampled_rows[: len(self.sampled_chunks)])


@dataclass(frozen=True, slots=True)
class Arriving:
    """Tokens in flight that a step reads."""

    targets: Slot
    """[F] int64: their indices among the step's tokens."""
    rows: Slot
    """[F] int64: their indices in `newest`."""
    newest: Tensor

    def copy_to(self, token_ids: Tensor) -> None:
        """Copy them to a step's tokens, [T] int64. The upload has been sent by now."""
        newest = self.newest.index_select(0, self.rows.tensor)
        token_ids.index_copy_(0, self.targets.tensor, newest)


class InFlight:
    """Keeps the newest tokens on the device, for steps that begin before these are committed."""

    def __init__(self, device: torch.device) -> None:
        self._newest = torch.empty(0, dtype=torch.int64, device=device)
        self._rows: dict[int, int] = {}
        """Indices into `_newest`, by sequence id."""

    def keep(self, sampled: Sequence[tuple[Sequence[Chunk], Tensor]]) -> None:
        """Keep the tokens of a step, in the place of the last one's.

        sampled: chunks, and [S] int64, the token of each, for every forward pass of the step.
        """
        ids = [chunk.sequence.id for chunks, _ in sampled for chunk in chunks]
        self._rows = {sequence_id: row for row, sequence_id in enumerate(ids)}
        self._newest = torch.cat([self._newest[:0], *(token_ids for _, token_ids in sampled)])

    def plan(self, places: Places, upload: Upload) -> Arriving | None:
        """Add to the upload which tokens a step reads. Returns None if it reads none."""
        arriving = [
            (start + len(chunk.sequence.token_ids) - chunk.start, self._rows[chunk.sequence.id])
            for chunk, start in places
            if chunk.ends_in_flight
        ]
        if not arriving:
            return None
        targets, rows = (upload.put(np.array(each, int)) for each in zip(*arriving, strict=True))
        return Arriving(targets, rows, self._newest)


class InputBuilder:
    """Builds the inputs of each step. Keeps the sequences' block tables on the device."""

    def __init__(self, groups: Sequence[CacheGroup], staging: Staging) -> None:
        self._groups = groups
        self._staging = staging
        self._tables = [BlockTables(g, group, staging.device) for g, group in enumerate(groups)]

    @torch.inference_mode()
    def build(
        self,
        plan: StepPlan,
        *,
        size: StepSize | None = None,
        columns: Sequence[Column] = (),
        in_flight: InFlight | None = None,
    ) -> StepInputs:
        """Start copying the inputs to the device. Does not wait.

        size: pad the step to this size, into which it fits. By default it is not padded. columns:
        those that the step uses. in_flight: has the last tokens of chunks that are in flight.
        """
        places = Places(plan.chunks) if size is None else PaddedPlaces(plan.chunks, size)
        upload = Upload(self._staging)
        columns_of_tokens = self._tokens(places)
        applied = [column.plan(places, columns_of_tokens, upload) for column in columns]
        tokens = upload.put(columns_of_tokens)
        sampled_rows = upload.put(places.of_samples())
        context_lens = upload.put(places.context_lens())
        starts = upload.put(places.query_starts())
        updates = [tables.put(places.chunks, upload) for tables in self._tables]
        table_rows = [upload.put(places.by_sequence(update.rows)) for update in updates]
        arriving = None if in_flight is None else in_flight.plan(places, upload)
        upload.send()
        if arriving is not None:
            arriving.copy_to(tokens.tensor[0])
        width = places.num_blocks(self._groups[0].part_size)
        block_tables: list[Tensor] = []
        for tables, update, rows in zip(self._tables, updates, table_rows, strict=True):
            tables.write(update)
            block_tables.append(tables.read(rows.tensor, width))
        batch = PagedBatch(
            query_starts=starts.tensor,
            context_lens=context_lens.tensor,
            block_tables=block_tables[0],
            slot_mapping=tokens.tensor[2],
            spans=places.spans(),
            num_decodes=places.size.num_decodes,
        )
        for column in applied:
            batch = column.batched(batch)
        batches = in_groups(batch, tokens.tensor, block_tables)
        return StepInputs(tokens.tensor, sampled_rows.tensor, batches, places.sampled, applied)

    def _tokens(self, places: Places) -> NDArray[np.int64]:
        """Return [2 + G, T]: ids, positions, slots. The id of a token in flight is 0."""
        tokens = np.zeros((2 + len(self._groups), places.size.num_tokens), np.int64)
        tokens[2:] = PADDING_SLOT
        num_decodes = places.step.num_decodes
        tokens[:, :num_decodes] = self._of_decodes(places.chunks[:num_decodes])
        if longer := places.chunks[num_decodes:]:
            of_longer = self._of_longer(longer)
            first = places.size.num_decodes
            tokens[:, first : first + of_longer.shape[1]] = of_longer
        return tokens

    def _of_decodes(self, chunks: Sequence[Chunk]) -> NDArray[np.int64]:
        ids = [0 if c.ends_in_flight else c.sequence.token_ids[c.start] for c in chunks]
        positions = np.array([chunk.start for chunk in chunks], int)
        slots = [self._first_slots(chunks, positions, g) for g in range(len(self._groups))]
        return np.stack([np.array(ids, int), positions, *slots])

    def _first_slots(
        self, chunks: Sequence[Chunk], positions: NDArray[np.int64], g: int
    ) -> NDArray[np.int64]:
        """Return the slot of each chunk's first position in group `g`."""
        size = self._groups[g].block_size
        blocks = [chunk.tables[g].blocks[chunk.start // size] for chunk in chunks]
        return np.array(blocks, int) * self._groups[g].slot_stride + positions % size

    def _of_longer(self, chunks: Sequence[Chunk]) -> NDArray[np.int64]:
        """Return the same as `_of_decodes` for chunks of any lengths, one after the other."""
        ids: list[int] = []
        for chunk in chunks:
            known = chunk.sequence.token_ids[chunk.start : chunk.end]
            ids += known
            ids += repeat(0, chunk.length - len(known))
        lengths = np.array([chunk.length for chunk in chunks], int)
        starts = np.array([chunk.start for chunk in chunks], int)
        before = lengths.cumsum() - lengths
        positions = np.arange(len(ids)) + (starts - before).repeat(lengths)
        slots = [self._slots(chunks, lengths, positions, g) for g in range(len(self._groups))]
        return np.stack([np.array(ids, int), positions, *slots])

    def _slots(
        self,
        chunks: Sequence[Chunk],
        lengths: NDArray[np.int64],
        positions: NDArray[np.int64],
        g: int,
    ) -> NDArray[np.int64]:
        """Return the slot of each of the chunks' positions in group `g`."""
        size = self._groups[g].block_size
        blocks: list[int] = []  # only those written, since tables may be long
        skipped: list[int] = []
        for chunk in chunks:
            first = chunk.start // size
            skipped.append(first - len(blocks))
            blocks += chunk.tables[g].blocks[first : -(-chunk.end // size)]
        numbers, offsets = np.divmod(positions, size)
        written = np.array(blocks, int)[numbers - np.array(skipped, int).repeat(lengths)]
        return written * self._groups[g].slot_stride + offsets


def in_groups(
    first: PagedBatch, tokens: Tensor, block_tables: Sequence[Tensor]
) -> tuple[PagedBatch, ...]:
    """Return a batch for each cache group.

    first: that of the first group. tokens: as in `StepInputs`. block_tables: those of each group.
    """
    others = zip(block_tables[1:], tokens[3:], strict=True)
    return (first, *(first.with_tables(table, slots) for table, slots in others))
