"""Physical blocks, counted by reference."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable


class BlockPool:
    """Blocks `0 : num_blocks`, and how many tables point to each. A block is free at count 0.

    ```
             allocate                       release
      free ───────────▶ held by 1 ─────────────────────────▶ free
                          │   ▲
                    share ▼   │ release
                        held by k, and written by nobody
    ```
    """

    def __init__(self, num_blocks: int) -> None:
        self._free = deque(range(num_blocks))
        self._num_references = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def num_references(self, block: int) -> int:
        return self._num_references[block]

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
