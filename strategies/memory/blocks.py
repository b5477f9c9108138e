"""Paged KV memory: blocks on demand, anywhere, counted by reference.

The block manager of the PagedAttention paper (SOSP 2023, section 4.2). A sequence's last block
is the only one that can be partly empty, so at most `block_size - 1` slots of it are wasted.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from strategies.memory.base import KVMemory


class BlockPool:
    """Physical blocks and how many tables point to each. A block is free at count 0."""

    def __init__(self, num_blocks: int) -> None:
        self._free = deque(range(num_blocks))
        self._num_references = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, num_blocks: int) -> tuple[int, ...]:
        """Free blocks, each with one reference now. The caller has checked `num_free`."""
        assert num_blocks <= self.num_free
        blocks = tuple(self._free.popleft() for _ in range(num_blocks))
        for block in blocks:
            self._num_references[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each of these held blocks."""
        for block in blocks:
            assert self._num_references[block] > 0, f"block {block} is free"
            self._num_references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One reference less to each; a block without any is free, and used again last."""
        for block in blocks:
            assert self._num_references[block] > 0, f"block {block} is released twice"
            self._num_references[block] -= 1
            if self._num_references[block] == 0:
                self._free.append(block)

    def check_integrity(self, tables: Iterable[tuple[int, ...]]) -> None:
        """Raises AssertionError where the counts differ from what these tables hold."""
        held = Counter(block for table in tables for block in table)
        assert self._num_references == [held[block] for block in range(len(self._num_references))]
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & held.keys(), "a block is held and free"
        assert len(free) + len(held) == len(self._num_references), "a block is lost"


class PagedMemory(KVMemory):
    """Grows a sequence's table block by block as its tokens are computed."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self._pool = BlockPool(num_blocks)

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    def grow(self, sequence_id: int, num_tokens: int) -> bool:
        table = self.table(sequence_id)
        num_missing = self.blocks_for(num_tokens) - len(table)
        if num_missing > self._pool.num_free:
            return False
        if num_missing > 0:
            self._tables[sequence_id] = table + self._pool.allocate(num_missing)
        return True

    def release(self, sequence_id: int) -> None:
        self._pool.release(self._tables.pop(sequence_id, ()))

    def check_integrity(self) -> None:
        self._pool.check_integrity(self._tables.values())
