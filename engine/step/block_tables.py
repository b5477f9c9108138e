"""Block tables that stay on the device. A step sends only the entries that changed.

If one sequence is long, a step's tables as one array, [N, longest], would be megabytes, and nearly
all of its entries would equal those of the previous step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.configuration.kv_layout import CacheGroup
from core.configuration.step_size import MAX_PROMPTS
from core.plan import Chunk
from engine.staging import Slot, Upload


@dataclass(frozen=True, slots=True)
class TableUpdate:
    """The entries that a step's chunks change, on their way to the device."""

    rows: list[int]
    """The row of each chunk's sequence."""
    changed: Sequence[Chunk]
    targets: Slot | None
    """[E] int64: indices into the flat table; None if all entries are there already."""
    entries: Slot | None
    """[E] int32: the block at each of them."""


class BlockTables:
    """A row for each sequence of the last steps, in one int32 tensor: its table in a cache group.

    `_sent` holds the blocks that the device has in a sequence's row. It is compared with the blocks
    of every chunk, so it makes no difference why a table changed (preemption, swapping, copying on
    write, cached prefixes, a sequence that ended) or whether a plan failed. A row is removed from
    `_sent` before the device writes it, and set again once the write is launched: if sending fails
    in between, the next step sends the whole row.
    """

    def __init__(self, index: int, group: CacheGroup, device: torch.device) -> None:
        """index: that of the group."""
        self._index = index
        self._group = group
        self._table = torch.zeros(0, 0, dtype=torch.int32, device=device)
        self._rows: dict[int, int] = {}
        """Row by sequence id."""
        self._free_rows: list[int] = []
        self._sent: dict[int, tuple[int, ...]] = {}
        """Blocks by sequence id. Stale ones need not be sent, but they do no harm."""

    def put(self, chunks: Sequence[Chunk], upload: Upload) -> TableUpdate:
        """Add the entries that changed to the upload. Call `write` after its `send`."""
        sent, index, num_parts = self._sent, self._index, self._group.num_parts
        changed = [c for c in chunks if sent.get(c.sequence.id) is not c.tables[index].blocks]
        longest = num_parts * max((len(c.tables[index].blocks) for c in changed), default=0)
        if len(chunks) > len(self._table) or longest > self._table.shape[1]:
            self._grow(len(chunks), longest)
            changed = chunks
        self._assign_rows(chunks, changed)
        rows = [self._rows[chunk.sequence.id] for chunk in chunks]
        targets: list[int] = []
        entries: list[int] = []
        for chunk in changed:
            old, new = sent.pop(chunk.sequence.id, ()), chunk.tables[index].blocks
            start = len(old) if new[: len(old)] == old else 0
            first = self._rows[chunk.sequence.id] * self._table.shape[1]
            targets += range(first + start * num_parts, first + len(new) * num_parts)
            entries += new[start:]
        if not targets:  # the same blocks as before, in a new tuple
            return TableUpdate(rows, changed, None, None)
        return TableUpdate(
            rows,
            changed,
            upload.put(np.array(targets, np.int64)),
            upload.put(self._parts_of(entries)),
        )

    def write(self, update: TableUpdate) -> None:
        """Write the entries of the last `put`."""
        if update.targets is not None and update.entries is not None:
            self._table.view(-1).index_copy_(0, update.targets.tensor, update.entries.tensor)
        for chunk in update.changed:
            self._sent[chunk.sequence.id] = chunk.tables[self._index].blocks

    def _parts_of(self, blocks: Sequence[int]) -> NDArray[np.int32]:
        """Return the blocks as kernels number them."""
        numbers = np.array(blocks, np.int32)
        return numbers if self._group.num_parts == 1 else self._divided(numbers)

    def _divided(self, blocks: NDArray[np.int32]) -> NDArray[np.int32]:
        parts = np.arange(self._group.num_parts, dtype=np.int32)
        return (blocks[:, None] * self._group.part_stride + parts).ravel()

    def read(self, rows: Tensor, width: int) -> Tensor:
        """Return the first entries of the rows [N], [N, width]."""
        return self._table[:, :width].index_select(0, rows)

    def _assign_rows(self, chunks: Sequence[Chunk], changed: Sequence[Chunk]) -> None:
        """Give each new sequence a row. If too few are free, drop all sequences without a chunk."""
        new = [chunk.sequence.id for chunk in changed if chunk.sequence.id not in self._rows]
        if len(new) > len(self._free_rows):
            self._drop_all_but({chunk.sequence.id for chunk in chunks})
        for sequence_id in new:
            self._rows[sequence_id] = self._free_rows.pop()

    def _drop_all_but(self, sequence_ids: set[int]) -> None:
        for sequence_id in self._rows.keys() - sequence_ids:
            self._free_rows.append(self._rows.pop(sequence_id))
            self._sent.pop(sequence_id, None)

    def _grow(self, num_rows: int, width: int) -> None:
        """Allocate a larger tensor. All rows must be sent again.

        The table has twice as many rows as a step has sequences, because two overlapped steps may
        have no sequence in common.
        """
        num_rows = max(len(self._table), _power_of_two(2 * num_rows))
        width = max(self._table.shape[1], _power_of_two(width))
        self._table = self._table.new_zeros(num_rows, width)
        self._free_rows = list(range(num_rows))
        self._rows.clear()
        self._sent.clear()


def _power_of_two(number: int) -> int:
    """Return the smallest power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()


def table_bytes(max_sequences: int, max_blocks: int) -> int:
    """Return the bytes of the largest table, one step's copy of it and the CUDA graphs' copy."""
    kept = _power_of_two(2 * max_sequences) * _power_of_two(max_blocks)
    of_graphs = max_sequences + MAX_PROMPTS  # a graph has rows for decodes, then for prompts
    return (kept + (max_sequences + of_graphs) * max_blocks) * torch.int32.itemsize
