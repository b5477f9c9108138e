"""Paged KV memory: blocks are allocated on demand, shared by reference and copied on write.

The block manager of the PagedAttention paper (SOSP 2023, sections 4.2 to 4.4). Only the last block
of a sequence can be partly empty, so a sequence wastes at most `block_size - 1` slots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping
from itertools import chain

from core.plan import BlockMoves, Chunk
from core.sequence import Sequence
from strategies.memory.base import KVMemory, Span
from strategies.memory.pool import BlockPool
from strategies.memory.prefix import PrefixCache


class PagedMemory(KVMemory):
    """Extends a sequence's block table as its tokens are computed.

    With `caches_prefixes`, a full block can be found by its prefix while it is held, and afterwards
    until it is evicted. The least recently released blocks are evicted first. Of blocks that were
    released together, the last one of the table goes first.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        num_host_blocks: int = 0,
        caches_prefixes: bool = True,
    ) -> None:
        super().__init__(num_blocks, block_size)
        self.caches_prefixes = caches_prefixes
        self._pool = BlockPool(num_blocks)
        self._prefixes = PrefixCache()
        self.num_host_blocks = num_host_blocks
        self._host = BlockPool(num_host_blocks)
        self._swapped: dict[int, tuple[int, ...]] = {}
        """Tables of host blocks. A sequence has either a device table or a host table."""
        self._swap_outs: list[tuple[int, int]] = []
        self._swap_ins: list[tuple[int, int]] = []

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    @property
    def kept_blocks(self) -> Collection[int]:
        return self._pool.kept

    def reserve(self, spans: Collection[Span]) -> bool:
        if len(spans) == 1 and self._is_writable(*spans):
            return True
        if self._num_missing(spans) > self._pool.num_free:
            return False
        for span in spans:
            self._copy_on_write(span)
            table = self.table(span.sequence_id)
            num_missing = self.blocks_for(span.end) - len(table)
            if num_missing > 0:
                self._tables[span.sequence_id] = table + self._allocate(num_missing)
        return True

    def adopt(self, sequence: Sequence) -> int:
        """Give a sequence that holds no blocks the cached blocks of its prefix.

        Returns how many of its tokens these blocks hold. That is never all of them, because at
        least one token must be computed to get logits.
        """
        assert sequence.id not in self._tables, "the sequence already holds blocks"
        num_blocks = sequence.num_skippable_tokens // self.block_size
        contents = (self._content(sequence, index) for index in range(num_blocks))
        blocks = self._prefixes.find(contents, sequence.prefix_salt)
        if blocks:
            self._pool.share(blocks)
            self._tables[sequence.id] = tuple(blocks)
        return len(blocks) * self.block_size

    def commit(self, chunk: Chunk) -> None:
        """Add the blocks that the chunk has filled to the prefix cache.

        ```
        table   | cached | cached | cached | filled | filled | open |
                                   first ──▶                 ◀── end
        ```
        """
        first, end = chunk.start // self.block_size, chunk.end // self.block_size
        if not self.caches_prefixes or first == end:
            return
        table = list(self.table(chunk.sequence.id))
        while first > 0 and table[first - 1 : first] and table[first - 1] not in self._prefixes:
            first -= 1  # swapped in from the host, into blocks that are not in the cache
        if table[first:end] != list(chunk.blocks[first:end]):
            return  # the sequence was preempted after this step was planned
        cached: dict[int, int] = {}
        for index in range(first, end):
            block = table[index]
            table[index] = self._cached_block(chunk.sequence, table, index)
            if table[index] != block:
                cached[block] = table[index]
        if cached:
            self._replace(chunk.sequence.id, cached)

    def _cached_block(self, sequence: Sequence, table: list[int], index: int) -> int:
        """Add `table[index]` to the prefix cache. Returns the block that the cache has.

        It is another one if the cache already has that prefix.
        """
        if index > 0:
            parent = self._prefixes.digest(table[index - 1])
        else:
            parent = self._prefixes.root(sequence.prefix_salt)
        return self._prefixes.add(table[index], parent, self._content(sequence, index))

    def _replace(self, sequence_id: int, cached: Mapping[int, int]) -> None:
        """Replace blocks by cached ones with the same content, in every table that holds them.

        Besides the sequence that filled them, these are the tables of sequences that were forked
        from it while the step ran. Most of them are the newest tables.
        """
        for holder in chain((sequence_id,), reversed(self._tables)):
            table = self._tables[holder]
            old = [block for block in table if block in cached]
            self._pool.share(cached[block] for block in old)
            self._pool.release(old)
            self._tables[holder] = tuple(cached.get(block, block) for block in table)
            if not any(map(self._pool.num_references, cached)):
                return

    def _content(self, sequence: Sequence, index: int) -> bytes:
        """Return the contents of the sequence's block `index`, for the prefix cache."""
        start = index * self.block_size
        return sequence.content(start, start + self.block_size)

    def fork(self, parent_id: int, child_id: int, num_tokens: int) -> None:
        """Share the parent's blocks, on the device or the host."""
        self.release(child_id)
        for pool, tables in ((self._pool, self._tables), (self._host, self._swapped)):
            if parent_id in tables:
                tables[child_id] = tables[parent_id][: self.blocks_for(num_tokens)]
                pool.share(tables[child_id])

    def swap_out(self, sequence_ids: Iterable[int]) -> bool:
        """Move all blocks of these sequences to the host, each shared block once.

        Returns False, and moves nothing, if they hold no blocks or the host has no room.
        """
        tables = {id: self._tables[id] for id in sequence_ids if id in self._tables}
        blocks = _distinct(tables)
        if not 0 < len(blocks) <= self._host.num_free:
            return False
        homes = dict(zip(blocks, self._host.allocate(len(blocks)), strict=True))
        for sequence_id, table in tables.items():
            self._swapped[sequence_id] = tuple(homes[block] for block in table)
            self._host.share(self._swapped[sequence_id])
            self._release(self._tables.pop(sequence_id))
        self._host.release(homes.values())
        self._swap_outs += homes.items()
        return True

    def swap_in(self, sequence_ids: Iterable[int]) -> None:
        """Move the blocks of these sequences back. The caller has checked that they fit."""
        tables = {id: self._swapped.pop(id) for id in sequence_ids if id in self._swapped}
        blocks = _distinct(tables)
        homes = dict(zip(blocks, self._allocate(len(blocks)), strict=True))
        for sequence_id, table in tables.items():
            self._tables[sequence_id] = tuple(homes[block] for block in table)
            self._pool.share(self._tables[sequence_id])
            self._host.release(table)
        self._pool.release(homes.values())
        self._swap_ins += homes.items()

    def is_swapped(self, sequence_id: int) -> bool:
        return sequence_id in self._swapped

    def release(self, sequence_id: int) -> None:
        self._release(self._tables.pop(sequence_id, ()))
        self._host.release(self._swapped.pop(sequence_id, ()))

    def take_moves(self) -> BlockMoves:
        moves = BlockMoves(tuple(self._swap_outs), tuple(self._swap_ins), tuple(self._copies))
        self._swap_outs, self._swap_ins, self._copies = [], [], []
        return moves

    def _is_writable(self, span: Span) -> bool:
        """Whether the span needs no new block and no copy, which is true of most decode steps.

        If so, the block where it starts is removed from the prefix cache.
        """
        table = self._tables.get(span.sequence_id, ())
        if span.end > len(table) * self.block_size:
            return False
        block = table[span.start // self.block_size]
        if self._pool.num_references(block) > 1:
            return False
        self._prefixes.remove(block)
        return True

    def _num_missing(self, spans: Collection[Span]) -> int:
        """Return how many blocks these spans need: new ones, and copies of shared ones."""
        num_new = sum(
            max(0, self.blocks_for(span.end) - len(self.table(span.sequence_id))) for span in spans
        )
        partial = (self._block_at(span) for span in spans)
        writers = Counter(block for block in partial if block is not None)
        # If all sequences that share a block write into it, the last one keeps it.
        return num_new + sum(
            min(count, self._pool.num_references(block) - 1) for block, count in writers.items()
        )

    def _block_at(self, span: Span) -> int | None:
        """Return the held block where the span starts, if any; only this one may be shared."""
        table = self.table(span.sequence_id)
        index = span.start // self.block_size
        return table[index] if index < len(table) else None

    def _copy_on_write(self, span: Span) -> None:
        shared = self._block_at(span)
        if shared is None:
            return
        if self._pool.num_references(shared) == 1:
            # The block may still be cached: the parent that filled it was freed.
            self._prefixes.remove(shared)
            return
        [copy] = self._allocate(1)
        self._release((shared,))
        self._copies.append((shared, copy))
        table, index = self.table(span.sequence_id), span.start // self.block_size
        self._tables[span.sequence_id] = (*table[:index], copy, *table[index + 1 :])

    def _allocate(self, num_blocks: int) -> tuple[int, ...]:
        blocks = self._pool.allocate(num_blocks)
        for block in blocks:
            self._prefixes.remove(block)
        return blocks

    def _release(self, blocks: tuple[int, ...]) -> None:
        """Release the last block first, so that it is also the first to be evicted."""
        self._pool.release(reversed(blocks), cached=self._prefixes)

    def rebuild(self, sequence_ids: Container[int]) -> None:
        self._tables = {id: table for id, table in self._tables.items() if id in sequence_ids}
        self._swapped = {id: table for id, table in self._swapped.items() if id in sequence_ids}
        self._pool = BlockPool(self.num_blocks, self._tables.values())
        self._host = BlockPool(self.num_host_blocks, self._swapped.values())
        self._prefixes = PrefixCache()

    def check_integrity(self) -> None:
        self._pool.check_integrity(self._tables.values(), cached=self._prefixes)
        self._host.check_integrity(self._swapped.values())
        assert not self._tables.keys() & self._swapped.keys(), "a sequence has two tables"


def _distinct(tables: Mapping[int, tuple[int, ...]]) -> list[int]:
    return list(dict.fromkeys(block for table in tables.values() for block in table))
