"""Reserved KV memory: one contiguous run of blocks per sequence, taken when it is admitted.

How systems before paging kept K/V (Orca and FasterTransformer as the PagedAttention paper
describes them, section 3.1): what is reserved and not yet used is wasted, and so are the gaps
between runs that are too short for the next sequence.

```
blocks   | run of A      | gap | run of B           | gap     |
         |<-used->|<res->|     |<-used->|<-reserved>|
```
"""

from __future__ import annotations

from strategies.memory.base import KVMemory


class SlotMemory(KVMemory):
    """First fit over the gaps between held runs. A run never grows: reserve the whole length."""

    @property
    def num_free_blocks(self) -> int:
        return self.num_blocks - sum(map(len, self._tables.values()))

    def grow(self, sequence_id: int, num_tokens: int) -> bool:
        num_needed = self.blocks_for(num_tokens)
        if sequence_id in self._tables:
            assert num_needed <= len(self._tables[sequence_id]), "a reserved run cannot grow"
            return True
        start = self._first_fit(num_needed)
        if start is None:
            return False
        self._tables[sequence_id] = tuple(range(start, start + num_needed))
        return True

    def release(self, sequence_id: int) -> None:
        self._tables.pop(sequence_id, None)

    def _first_fit(self, num_needed: int) -> int | None:
        start = 0
        for table in sorted(self._tables.values()):
            if table[0] - start >= num_needed:
                return start
            start = table[-1] + 1
        return start if self.num_blocks - start >= num_needed else None

    def check_integrity(self) -> None:
        held = [block for table in sorted(self._tables.values()) for block in table]
        assert held == sorted(set(held)), "two runs overlap"
        assert not held or held[-1] < self.num_blocks, "a run ends outside the memory"
