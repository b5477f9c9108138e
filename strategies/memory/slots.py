"""Reserved KV memory: one contiguous run of blocks per sequence, allocated at admission.

Systems before paging kept K/V this way (Orca and FasterTransformer, as the PagedAttention paper
describes them in section 3.1). Reserved slots that are not yet used are wasted, and so are gaps
between runs that are too short for the next sequence.

```
blocks   | run of A      | gap | run of B           | gap     |
         |<-used->|<res->|     |<-used->|<-reserved>|
```
"""

from __future__ import annotations

from collections.abc import Collection, Container

from core.plan import Chunk
from strategies.memory.base import KVMemory, Span


class SlotMemory(KVMemory):
    """Allocates runs by first fit. A run never grows, so a sequence reserves all of it at once."""

    @property
    def num_free_blocks(self) -> int:
        return self.num_blocks - sum(map(len, self._tables.values()))

    def reserve(self, spans: Collection[Span]) -> bool:
        for sequence_id, _, end in spans:
            start = self._first_fit(self.blocks_for(end))
            if start is None:
                for span in spans:
                    self.release(span.sequence_id)
                return False
            self._tables[sequence_id] = tuple(range(start, start + self.blocks_for(end)))
        return True

    def release(self, sequence_id: int) -> None:
        self._tables.pop(sequence_id, None)

    def fork(self, parent_id: int, child_id: int, num_tokens: int) -> None:
        """Copy the parent's used blocks into the child's run."""
        used = self.table(parent_id)[: self.blocks_for(num_tokens)]
        self._copies += zip(used, self.table(child_id), strict=False)

    def commit(self, chunk: Chunk) -> None:
        """Do nothing: runs are never shared."""

    def _first_fit(self, num_needed: int) -> int | None:
        start = 0
        for table in sorted(self._tables.values()):
            if table[0] - start >= num_needed:
                return start
            start = table[-1] + 1
        return start if self.num_blocks - start >= num_needed else None

    def rebuild(self, sequence_ids: Container[int]) -> None:
        self._tables = {id: run for id, run in self._tables.items() if id in sequence_ids}

    def check_integrity(self) -> None:
        held = [block for table in sorted(self._tables.values()) for block in table]
        assert held == sorted(set(held)), "two runs overlap"
        assert not held or held[-1] < self.num_blocks, "a run ends outside the memory"
