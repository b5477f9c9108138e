"""A pool of physical blocks with reference counts."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Container, Iterable


class BlockPool:
    """Blocks `0 : num_blocks`, and how many tables refer to each. A block is free at count 0.

    ```
                 allocate                      release
        free ──────────────▶ held by 1 ─────────────────────▶ free
          ▲                    │   ▲                     or
          │              share ▼   │ release                │
          │                held by k, read-only             │
          │                    ▲                            ▼
          │                    └────────── share ───── free, content kept
          └────────────────────── evict ────────────────────┘
    ```

    `allocate` takes blocks without cached content first, then evicts those released longest ago.
    """

    def __init__(self, num_blocks: int, tables: Iterable[Collection[int]] = ()) -> None:
        """tables: block tables that hold some of the blocks already."""
        held = Counter(block for table in tables for block in table)
        self._empty = deque(block for block in range(num_blocks) if block not in held)
        self._kept: dict[int, None] = {}
        """Free blocks with cached content, in the order of their release."""
        self._num_references = [held[block] for block in range(num_blocks)]

    @property
    def num_free(self) -> int:
        return len(self._empty) + len(self._kept)

    @property
    def kept(self) -> Collection[int]:
        """Free blocks with cached content, in the order of their release."""
        return self._kept.keys()

    def num_references(self, block: int) -> int:
        return self._num_references[block]

    def allocate(self, num_blocks: int) -> tuple[int, ...]:
        """Take free blocks and give each one reference. Their content is lost.

        The caller has checked `num_free`.
        """
        assert num_blocks <= self.num_free
        blocks = tuple(self._take() for _ in range(num_blocks))
        for block in blocks:
            self._num_references[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of these blocks, which are held or have cached content."""
        for block in blocks:
            if self._num_references[block] == 0:
                assert block in self._kept, f"block {block} is free"
                del self._kept[block]
            self._num_references[block] += 1

    def release(self, blocks: Iterable[int], cached: Container[int] = ()) -> None:
        """Remove a reference from each block. Blocks without references become free.

        cached: the blocks whose content is kept when they are free.
        """
        for block in blocks:
            assert self._num_references[block] > 0, f"block {block} is released twice"
            self._num_references[block] -= 1
            if self._num_references[block] > 0:
                continue
            if block in cached:
                self._kept[block] = None
            else:
                self._empty.append(block)

    def empty(self, block: int) -> None:
        """Note that a block's content is no longer cached, if it is free."""
        if block in self._kept:
            del self._kept[block]
            self._empty.append(block)

    def _take(self) -> int:
        return self._empty.popleft() if self._empty else self._evict()

    def _evict(self) -> int:
        oldest = next(iter(self._kept))
        del self._kept[oldest]
        return oldest

    def check_integrity(
        self, tables: Iterable[Collection[int]], cached: Container[int] = ()
    ) -> None:
        """Raise AssertionError if the reference counts differ from what these tables hold."""
        held = Counter(block for table in tables for block in table)
        assert self._num_references == [held[block] for block in range(len(self._num_references))]
        free = {*self._empty, *self._kept}
        assert len(free) == self.num_free, "a block is free twice"
        assert not free & held.keys(), "a block is held and free"
        assert len(free) + len(held) == len(self._num_references), "a block is lost"
        assert all(block in cached for block in self._kept), "a kept block is not cached"
        assert not any(block in cached for block in self._empty), "an empty block is cached"
