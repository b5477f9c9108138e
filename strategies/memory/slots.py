"""Reserved KV memory: a contiguous run of blocks per sequence, allocated at admission.

Systems before paging kept K/V this way (Orca and FasterTransformer, as the PagedAttention paper
describes them in section 3.1). Reserved slots that are not yet used are wasted, and so are gaps
between runs that are too short for the next sequence.

```
blocks   | run of A      | gap | run of B           | gap     |
         |<-used->|<res->|     |<-used->|<-reserved>|
```

A sequence has a run in each cache group. If the group has a window, a run need not be longer than
the window and a step: it is a ring, whose oldest block the newest tokens overwrite.
"""

from __future__ import annotations

from collections.abc import Collection, Container
from itertools import chain, cycle, islice
from typing import TYPE_CHECKING

from core.plan import BlockTable, Chunk
from strategies.memory.base import KVMemory, Span, empty_slots

if TYPE_CHECKING:
    from core.configuration.kv_layout import KVLayout


class SlotMemory(KVMemory):
    """Allocates runs by first fit. A run never grows, so a sequence reserves all of it at once."""

    def __init__(self, num_blocks: int, layout: KVLayout) -> None:
        super().__init__(num_blocks, layout)
        self._runs: dict[int, list[range]] = {}
        """The runs of each sequence, one per group."""

    @property
    def num_free_blocks(self) -> int:
        return self.num_blocks - sum(map(len, chain(*self._runs.values())))

    def reserve(self, spans: Collection[Span]) -> bool:
        for sequence_id, _, end in spans:
            runs = self._runs[sequence_id] = []
            for group in self.layout.groups:
                length = group.most_blocks(end, self.layout.step_tokens)
                start = self._first_fit(length)
                if start is None:
                    for span in spans:
                        self.release(span.sequence_id)
                    return False
                runs.append(range(start, start + length))
            self._tables[sequence_id] = tuple(
                BlockTable(tuple(islice(cycle(run), group.blocks_for(end))))
                for group, run in zip(self.layout.groups, runs, strict=True)
            )
        return True

    def release(self, sequence_id: int) -> None:
        self._tables.pop(sequence_id, None)
        self._runs.pop(sequence_id, None)

    def held(self, sequence_id: int) -> list[int]:
        return list(chain(*self._runs.get(sequence_id, ())))

    def num_empty_slots(self, sequence_id: int, num_tokens: int) -> int:
        runs = zip(self.layout.groups, self._runs.get(sequence_id, ()), strict=False)
        return sum(empty_slots(self.layout, group, len(run), num_tokens) for group, run in runs)

    def fork(self, parent_id: int, child_id: int, num_tokens: int) -> None:
        """Copy the parent's blocks that are still read into the child's runs."""
        tables = self.tables(parent_id), self.tables(child_id)
        for group, parent, child in zip(self.layout.groups, *tables, strict=True):
            used = slice(group.first_block(num_tokens), group.blocks_for(num_tokens))
            self.copies += zip(parent.blocks[used], child.blocks[used], strict=False)

    def commit(self, chunk: Chunk) -> None:
        """Do nothing: runs are never shared."""

    def _first_fit(self, num_needed: int) -> int | None:
        start = 0
        for run in sorted(chain(*self._runs.values()), key=lambda run: run.start):
            if run.start - start >= num_needed:
                return start
            start = run.stop
        return start if self.num_blocks - start >= num_needed else None

    def rebuild(self, sequence_ids: Container[int]) -> None:
        self._tables = {id: tables for id, tables in self._tables.items() if id in sequence_ids}
        self._runs = {id: runs for id, runs in self._runs.items() if id in sequence_ids}

    def check_integrity(self) -> None:
        held = sorted(chain(*chain(*self._runs.values())))
        assert held == sorted(set(held)), "two runs overlap"
        assert not held or held[-1] < self.num_blocks, "a run ends outside the memory"
        assert self._runs.keys() == self._tables.keys()
