"""Paged KV memory: blocks are allocated on demand, shared by reference and copied on write.

The block manager of the PagedAttention paper (SOSP 2023, sections 4.2 to 4.4). Only the last block
of a sequence can be partly empty, so a sequence wastes at most `block_size - 1` slots.

The cache groups of a model draw their blocks from one pool: a block belongs to one group as long as
it is held or cached.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping
from functools import partial
from itertools import chain
from math import gcd
from typing import TYPE_CHECKING

from core.plan import BlockMoves, BlockTable, Chunk
from core.sequence import Sequence
from strategies.memory.base import KVMemory, Span, held_blocks
from strategies.memory.pool import BlockPool
from strategies.memory.prefix import Key, PrefixCache

if TYPE_CHECKING:
    from core.configuration.kv_layout import CacheGroup, KVLayout

Tables = tuple[BlockTable, ...]


class PagedMemory(KVMemory):
    """Extends a sequence's block tables as its tokens are computed.

    With `caches_prefixes`, a full block can be found by its prefix while it is held, and afterwards
    until it is evicted. The least recently released blocks are evicted first. Of blocks that were
    released together, the last one of the table goes first.
    """

    def __init__(
        self,
        num_blocks: int,
        layout: KVLayout,
        *,
        num_host_blocks: int = 0,
        caches_prefixes: bool = True,
        kind_of_prefixes: type[PrefixCache] = PrefixCache,
    ) -> None:
        super().__init__(num_blocks, layout)
        self._kind_of_prefixes = kind_of_prefixes
        self.caches_prefixes = caches_prefixes
        self.num_host_blocks = num_host_blocks
        self._commit_tokens = gcd(*(group.block_size for group in layout.groups))
        """A chunk that passes no multiple of this fills no block."""
        self._swap_outs: list[tuple[int, int]] = []
        self._begin({}, {})

    def _begin(self, tables: dict[int, Tables], swapped: dict[int, Tables]) -> None:
        """Start with these tables and an empty prefix cache."""
        self._tables = tables
        self._swapped = swapped
        """Tables of host blocks. A sequence has either device tables or host tables."""
        self._pool = BlockPool(self.num_blocks, map(held_blocks, tables.values()))
        self._host = BlockPool(self.num_host_blocks, map(held_blocks, swapped.values()))
        self._writable: dict[int, int] = {}
        """By sequence id: the position up to which it may write, from its newest token on, without
        another `reserve`. Its blocks there are neither shared nor cached."""
        self._prefixes = self._kind_of_prefixes(self.layout.groups)

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    @property
    def kept_blocks(self) -> Collection[int]:
        return self._pool.kept

    def reserve(self, spans: Collection[Span]) -> bool:
        if all(span.end <= self._writable.get(span.sequence_id, 0) for span in spans):
            return True  # as in most decode steps
        if self._num_missing(spans) > self._pool.num_free:
            return False
        for span in spans:
            tables = self.tables(span.sequence_id)
            extended = tuple(map(partial(self._extended, span), self.layout.groups, tables))
            if extended != tables:
                self._tables[span.sequence_id] = extended
            self._writable[span.sequence_id] = min(map(_num_slots, self.layout.groups, extended))
        return True

    def adopt(self, sequence: Sequence, forked_at: int | None = None) -> int:
        """Give a sequence that holds no blocks the cached blocks of its prefix.

        forked_at: other sequences will fork from so many of its first tokens.

        Returns how many of its tokens these blocks hold. That is never all of them, because at
        least one token must be computed to get logits.
        """
        assert sequence.id not in self._tables, "the sequence already holds blocks"
        if not self.caches_prefixes:
            return 0
        tables = self._find(sequence, forked_at)
        if tables[0].blocks:
            self._pool.share(held_blocks(tables))
            self._tables[sequence.id] = tables
        return len(tables[0].blocks) * self.layout.groups[0].block_size

    def _find(self, sequence: Sequence, forked_at: int | None) -> Tables:
        return self._prefixes.find(sequence, sequence.num_skippable_tokens)

    def commit(self, chunk: Chunk) -> None:
        """Add the blocks that the chunk has filled to the prefix cache.

        ```
        table   | cached | cached | cached | filled | filled | open |
                                   first ──▶                 ◀── end
        ```
        """
        if chunk.start // self._commit_tokens == chunk.end // self._commit_tokens:
            return
        for index, group in enumerate(self.layout.groups):
            first, end = chunk.start // group.block_size, chunk.end // group.block_size
            if first < end and self.caches_prefixes:
                self._cache(chunk, index, first, end)

    def _cache(self, chunk: Chunk, index: int, first: int, end: int) -> None:
        """Add the blocks `first : end` of group `index` to the prefix cache."""
        sequence = chunk.sequence
        blocks, left = self.tables(sequence.id)[index]
        first, prefixes = max(first, left), self._prefixes
        while first > left and blocks[first - 1 : first] and blocks[first - 1] not in prefixes:
            first -= 1  # swapped in from the host, into blocks that are not in the cache
        if blocks[first:end] != chunk.tables[index].blocks[first:end]:
            return  # the sequence was preempted after this step was planned
        cached: dict[int, int] = {}
        for number in range(first, end):
            block = blocks[number]
            known = prefixes.add(block, prefixes.key(index, sequence, number))
            if known != block:
                cached[block] = known
        if cached:
            self._replace(sequence.id, cached)

    def _replace(self, sequence_id: int, cached: Mapping[int, int]) -> None:
        """Replace blocks by cached ones with the same content, in every table that holds them.

        Besides the sequence that filled them, these are the tables of sequences that were forked
        from it while the step ran. Most of them are the newest tables.
        """
        for holder in chain((sequence_id,), reversed(self._tables)):
            tables = self._tables[holder]
            old = [block for block in held_blocks(tables) if block in cached]
            self._pool.share(cached[block] for block in old)
            self._pool.release(old)
            self._tables[holder] = _moved(tables, cached)
            if not any(map(self._pool.num_references, cached)):
                return

    def fork(self, parent_id: int, child_id: int, num_tokens: int) -> None:
        """Share the parent's blocks, on the device or the host."""
        self.release(child_id)
        self._writable.pop(parent_id, None)
        for pool, tables in ((self._pool, self._tables), (self._host, self._swapped)):
            if parent_id in tables:
                pairs = zip(self.layout.groups, tables[parent_id], strict=True)
                tables[child_id] = tuple(_start(*pair, num_tokens) for pair in pairs)
                pool.share(held_blocks(tables[child_id]))
        self._prefixes.fork(parent_id, child_id, num_tokens)

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
            self._swapped[sequence_id] = _moved(table, homes)
            self._host.share(held_blocks(self._swapped[sequence_id]))
            self._release(held_blocks(self._tables.pop(sequence_id)))
            self._writable.pop(sequence_id, None)
        self._host.release(homes.values())
        self._swap_outs += homes.items()
        return True

    def swap_in(self, sequence_ids: Iterable[int]) -> None:
        """Move the blocks of these sequences back. The caller has checked that they fit."""
        tables = {id: self._swapped.pop(id) for id in sequence_ids if id in self._swapped}
        blocks = _distinct(tables)
        homes = dict(zip(blocks, self._allocate(len(blocks)), strict=True))
        for sequence_id, table in tables.items():
            self._tables[sequence_id] = _moved(table, homes)
            self._pool.share(held_blocks(self._tables[sequence_id]))
            self._host.release(held_blocks(table))
        self._pool.release(homes.values())
        self.swap_ins += homes.items()

    def is_swapped(self, sequence_id: int) -> bool:
        return sequence_id in self._swapped

    def release(self, sequence_id: int) -> None:
        self._release(held_blocks(self._tables.pop(sequence_id, ())))
        self._host.release(held_blocks(self._swapped.pop(sequence_id, ())))
        self._writable.pop(sequence_id, None)
        self._prefixes.release(sequence_id)

    def take_moves(self) -> BlockMoves:
        moves = BlockMoves(tuple(self._swap_outs), tuple(self.swap_ins), tuple(self.copies))
        self._swap_outs, self.swap_ins, self.copies = [], [], []
        return moves

    def _num_missing(self, spans: Collection[Span]) -> int:
        """Return how many blocks these spans need: new ones, and copies of shared ones."""
        num_new = 0
        writers: Counter[int] = Counter()
        for span in spans:
            for group, table in zip(self.layout.groups, self.tables(span.sequence_id), strict=True):
                num_new += max(0, group.blocks_for(span.end) - len(table.blocks))
                block = _block_at(group, table, span)
                if block is not None:
                    writers[block] += 1
        # If all sequences that share a block write into it, the last one keeps it.
        return num_new + sum(
            min(count, self._pool.num_references(block) - 1) for block, count in writers.items()
        )

    def _extended(self, span: Span, group: CacheGroup, table: BlockTable) -> BlockTable:
        """Return a sequence's table with blocks for a span that no other sequence shares."""
        blocks, first = table
        shared = _block_at(group, table, span)
        if shared is not None and self._pool.num_references(shared) > 1:
            [copy] = self._allocate(1)
            self._release((shared,))
            self.copies.append((shared, copy))
            index = span.start // group.block_size
            blocks = (*blocks[:index], copy, *blocks[index + 1 :])
        elif shared is not None:
            # The block may still be cached: the parent that filled it was freed.
            self._forget(shared)
        num_missing = group.blocks_for(span.end) - len(blocks)
        if num_missing > 0:
            blocks += self._allocate(num_missing)
        return BlockTable(blocks, first)

    def _allocate(self, num_blocks: int) -> tuple[int, ...]:
        blocks = self._pool.allocate(num_blocks)
        for block in blocks:
            self._forget(block)
        return blocks

    def _forget(self, block: int) -> Key | None:
        """Remove a block whose content is lost from the prefix cache. Returns its key, if any."""
        return self._prefixes.remove(block)

    def _release(self, blocks: Collection[int]) -> None:
        """Release the last block first, so that it is also the first to be evicted."""
        self._pool.release(reversed(tuple(blocks)), cached=self._prefixes)

    def rebuild(self, sequence_ids: Container[int]) -> None:
        self._begin(
            {id: tables for id, tables in self._tables.items() if id in sequence_ids},
            {id: tables for id, tables in self._swapped.items() if id in sequence_ids},
        )

    def check_integrity(self) -> None:
        self._pool.check_integrity(map(held_blocks, self._tables.values()), cached=self._prefixes)
        self._host.check_integrity(map(held_blocks, self._swapped.values()))
        assert not self._tables.keys() & self._swapped.keys(), "a sequence has two tables"


def _num_slots(group: CacheGroup, table: BlockTable) -> int:
    return len(table.blocks) * group.block_size


def _block_at(group: CacheGroup, table: BlockTable, span: Span) -> int | None:
    """Return the held block where the span starts, if any; only this one may be shared."""
    index = span.start // group.block_size
    return table.blocks[index] if index < len(table.blocks) else None


def _start(group: CacheGroup, table: BlockTable, num_tokens: int) -> BlockTable:
    """Return the part of a table that a fork after `num_tokens` tokens holds."""
    first = group.first_block(num_tokens)
    assert table.first <= first, "the parent's window has left these tokens"
    return BlockTable(table.blocks[: group.blocks_for(num_tokens)], first)


def _moved(tables: Tables, homes: Mapping[int, int]) -> Tables:
    """Return the tables with blocks replaced. Stale entries may be any block."""
    return tuple(
        BlockTable(tuple(homes.get(block, block) for block in table.blocks), table.first)
        for table in tables
    )


def _distinct(tables: Mapping[int, Tables]) -> list[int]:
    return list(dict.fromkeys(chain.from_iterable(map(held_blocks, tables.values()))))
