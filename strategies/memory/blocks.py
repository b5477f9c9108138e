"""Paged KV memory: blocks on demand, anywhere, shared by reference and copied on write.

The block manager of the PagedAttention paper (SOSP 2023, sections 4.2 to 4.4). A sequence's last
block is the only one that can be partly empty, so at most `block_size - 1` slots of it are wasted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from core.plan import BlockMoves, Chunk
from core.sequence import Sequence
from strategies.memory.base import KVMemory, Span
from strategies.memory.pool import BlockPool
from strategies.memory.prefix import PrefixCache


class PagedMemory(KVMemory):
    """Grows a sequence's table block by block as its tokens are computed.

    Full blocks are found again by their prefix, unless `caches_prefixes` is false: while they are
    held, and after that until they are allocated for something else, the least recently used
    first, and of those released together the deepest.
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
        self._caches_prefixes = caches_prefixes
        self._pool = BlockPool(num_blocks)
        self._prefixes = PrefixCache(block_size)
        self._host = BlockPool(num_host_blocks)
        self._swapped: dict[int, tuple[int, ...]] = {}
        """Tables of host blocks; a sequence has its blocks here or there."""
        self._swap_outs: list[tuple[int, int]] = []
        self._swap_ins: list[tuple[int, int]] = []

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
                self._tables[span.sequence_id] = table + self._allocate(num_missing)
        return True

    def adopt(self, sequence: Sequence) -> int:
        """Gives a sequence that holds nothing the known blocks of its prefix.

        Returns how many of its tokens they hold: never all, since there must be logits to sample.
        """
        assert sequence.id not in self._tables, "it would lose its blocks"
        known = sequence.token_ids[: sequence.num_skippable_tokens]
        blocks = self._prefixes.find(known, sequence.prefix_salt)
        if blocks:
            self._pool.share(blocks)
            self._tables[sequence.id] = tuple(blocks)
        return len(blocks) * self.block_size

    def commit(self, chunk: Chunk) -> None:
        """Makes the blocks that the chunk has filled known.

        ```
        table   | known | known | known | filled | filled | open |
                                first ──▶                 ◀── end
        ```
        """
        first, end = chunk.start // self.block_size, chunk.end // self.block_size
        if not self._caches_prefixes or first == end:
            return
        table = list(self.table(chunk.sequence.id))
        while first > 0 and table[first - 1 : first] and table[first - 1] not in self._prefixes:
            first -= 1  # back from the host, in blocks that nobody knows yet
        if table[first:end] != list(chunk.blocks[first:end]):
            return  # preempted since
        for index in range(first, end):
            table[index] = self._known_block(chunk.sequence, table, index)
        self._tables[chunk.sequence.id] = tuple(table)

    def _known_block(self, sequence: Sequence, table: list[int], index: int) -> int:
        """The block known for this place: the table's own, or one that was filled alike before."""
        if index > 0:
            parent = self._prefixes.digest(table[index - 1])
        else:
            parent = self._prefixes.root(sequence.prefix_salt)
        start = index * self.block_size
        tokens = sequence.token_ids[start : start + self.block_size]
        known = self._prefixes.add(table[index], parent, tokens)
        if known != table[index]:
            self._pool.share([known])
            self._pool.release([table[index]])
        return known

    def fork(self, parent_id: int, child_id: int, num_tokens: int) -> None:
        """The child, which holds nothing, shares the blocks of its parent's first tokens."""
        assert child_id not in self._tables, "it would lose its blocks"
        shared = self.table(parent_id)[: self.blocks_for(num_tokens)]
        self._pool.share(shared)
        self._tables[child_id] = shared

    def reassign(
        self, sequence_ids: Collection[int], parents: Mapping[int, int], num_tokens: int
    ) -> None:
        for pool, tables in ((self._pool, self._tables), (self._host, self._swapped)):
            old = {each: tables.pop(each) for each in sequence_ids if each in tables}
            for child, parent in parents.items():
                if parent in old:
                    tables[child] = old[parent]
                    pool.share(old[parent])
            for table in old.values():
                pool.release(reversed(table), wanted=self._prefixes if pool is self._pool else ())

    def swap_out(self, sequence_ids: Iterable[int]) -> bool:
        """Moves all blocks of these sequences to the host, shared ones once; False: none fit."""
        tables = {each: self._tables[each] for each in sequence_ids if each in self._tables}
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
        """The way back. The caller has checked that there is room."""
        tables = {each: self._swapped.pop(each) for each in sequence_ids if each in self._swapped}
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
        for each in (self._swap_outs, self._swap_ins, self._copies):
            each.clear()
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
        if shared is None:
            return
        if self._pool.num_references(shared) == 1:
            # Known, where it was forked off one who had filled it and has gone since.
            self._prefixes.remove(shared)
            return
        [own] = self._allocate(1)
        self._release((shared,))
        self._copies.append((shared, own))
        table, index = self.table(span.sequence_id), span.start // self.block_size
        self._tables[span.sequence_id] = (*table[:index], own, *table[index + 1 :])

    def _allocate(self, num_blocks: int) -> tuple[int, ...]:
        blocks = self._pool.allocate(num_blocks)
        for block in blocks:
            self._prefixes.remove(block)
        return blocks

    def _release(self, blocks: tuple[int, ...]) -> None:
        """The last one first, so that it is also the first to be evicted."""
        self._pool.release(reversed(blocks), wanted=self._prefixes)

    def check_integrity(self) -> None:
        self._pool.check_integrity(self._tables.values(), wanted=self._prefixes)
        self._host.check_integrity(self._swapped.values())
        assert not self._tables.keys() & self._swapped.keys(), "here and there"


def _distinct(tables: Mapping[int, tuple[int, ...]]) -> list[int]:
    return list(dict.fromkeys(block for table in tables.values() for block in table))
