"""Paged KV memory: blocks on demand, anywhere, shared by reference and copied on write.

The block manager of the PagedAttention paper (SOSP 2023, sections 4.2 to 4.4). A sequence's last
block is the only one that can be partly empty, so at most `block_size - 1` slots of it are wasted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from core.plan import BlockMoves
from strategies.memory.base import KVMemory, Span
from strategies.memory.pool import BlockPool


class PagedMemory(KVMemory):
    """Grows a sequence's table block by block as its tokens are computed."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self._pool = BlockPool(num_blocks)
        self._copies: list[tuple[int, int]] = []

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    def reserve(self, spans: Collection[Span]) -> bool:
        if self._num_missing(spans) > self._pool.num_free:
            return False
        for span in spans:
            self._copy_on_write(span)
            table = self.table(span.sequence_id)
            num_missing = self.blocks_for(span.end) - len(table)
            if num_missing > 0:
                self._tables[span.sequence_id] = table + self._pool.allocate(num_missing)
        return True

    def fork(self, parent_id: int, child_id: int, num_tokens: int) -> None:
        """The child, which holds nothing, shares the blocks of its parent's first tokens."""
        assert child_id not in self._tables, "it would lose its blocks"
        shared = self.table(parent_id)[: self.blocks_for(num_tokens)]
        self._pool.share(shared)
        self._tables[child_id] = shared

    def release(self, sequence_id: int) -> None:
        self._pool.release(self._tables.pop(sequence_id, ()))

    def take_moves(self) -> BlockMoves:
        moves = BlockMoves(copies=tuple(self._copies))
        self._copies.clear()
        return moves

    def _num_missing(self, spans: Collection[Span]) -> int:
        """Blocks to allocate for these spans: the new ones, and copies of shared ones."""
        num_new = sum(
            max(0, self.blocks_for(span.end) - len(self.table(span.sequence_id))) for span in spans
        )
        begun = (self._block_at(span) for span in spans)
        writers = Counter(block for block in begun if block is not None)
        # Where all that share a block write into it, the last one keeps it.
        return num_new + sum(
            min(count, self._pool.num_references(block) - 1) for block, count in writers.items()
        )

    def _block_at(self, span: Span) -> int | None:
        """The held block that the span begins in, the only one that others may share."""
        table = self.table(span.sequence_id)
        index = span.start // self.block_size
        return table[index] if index < len(table) else None

    def _copy_on_write(self, span: Span) -> None:
        shared = self._block_at(span)
        if shared is None or self._pool.num_references(shared) == 1:
            return
        [own] = self._pool.allocate(1)
        self._pool.release([shared])
        self._copies.append((shared, own))
        table, index = self.table(span.sequence_id), span.start // self.block_size
        self._tables[span.sequence_id] = (*table[:index], own, *table[index + 1 :])

    def check_integrity(self) -> None:
        self._pool.check_integrity(self._tables.values())
