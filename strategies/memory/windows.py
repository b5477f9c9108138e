"""Paged memory of models with sliding windows: blocks that a window has left are released."""

from __future__ import annotations

from core.plan import BlockTable, Chunk
from core.sequence import Sequence
from strategies.memory.blocks import PagedMemory, Tables
from strategies.memory.prefix import Key
from strategies.memory.stops import Stops


class WindowedMemory(PagedMemory):
    """Frees blocks that none of their sequence's later tokens see; `Stops` says which stay cached.

    ```
    table   | stale | stale | held | held | open |
                      first ──▶
    ```
    """

    def _begin(self, tables: dict[int, Tables], swapped: dict[int, Tables]) -> None:
        super()._begin(tables, swapped)
        self._stops = Stops(self._prefixes, self.num_blocks)

    def _find(self, sequence: Sequence, forked_at: int | None) -> Tables:
        """Forks must find their windows where they fork, so no longer prefix is found."""
        limit = sequence.num_skippable_tokens
        limit = limit if forked_at is None else min(limit, forked_at)
        self._stops.learn(sequence, limit)
        return self._prefixes.find(sequence, limit)

    def commit(self, chunk: Chunk) -> None:
        super().commit(chunk)
        for index in range(len(self.layout.groups)):
            self._leave(chunk, index)

    def _leave(self, chunk: Chunk, index: int) -> None:
        """Release the blocks of group `index` that none of the sequence's later tokens see."""
        id = chunk.sequence.id
        tables = self.tables(id)
        blocks, old = tables[index]
        # A sequence that was preempted and began again may be behind the chunk.
        position = min(chunk.end, chunk.sequence.num_computed_tokens)
        first = min(self.layout.groups[index].first_block(position), len(blocks))
        if first <= old:
            return
        gone = blocks[old:first]
        for block in self._stops.unwanted(id, index, old, gone):
            if self._pool.num_references(block) == 1:
                key = self._prefixes.remove(block)
                if key is not None:
                    self._stops.forget(block, key, left_window=True)
        self._release(gone)
        self._tables[id] = (*tables[:index], BlockTable(blocks, first), *tables[index + 1 :])

    def release(self, sequence_id: int) -> None:
        super().release(sequence_id)
        self._stops.release(sequence_id)

    def _forget(self, block: int) -> Key | None:
        key = super()._forget(block)
        if key is not None:
            self._stops.forget(block, key, left_window=False)
        return key
