"""The layout of one step in KV memory, as the attention functions take it.

```
row of tokens   | a | b | c c c c | d d |    T = 8 tokens of N = 4 sequences
num_decodes     2                            a and b, with one token each, stand in front
query_starts            0         4     6    [N - num_decodes + 1], counted from after them
context_lens    9   6   4         11         [N], tokens of K/V each may see, its own included
block_tables    [[3, 0], [1, 5], [2, 0] ...] [N, B], entries past a sequence's end are 0
slot_mapping    where each token's K/V go    [T], block * block_size + offset
```

A row of padding, such as a captured CUDA graph has where its batch is not full, has a context of 0
and a slot of -1: nothing is read or written for it, and its attention is zero.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

Span = tuple[int, int, int]
"""First and past-last token of a sequence's chunk in the row of tokens, and its context length."""


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Chunks of several sequences as one flat row. Each tensor lives on the K/V's device."""

    query_starts: Tensor
    """int32."""
    context_lens: Tensor
    """int32."""
    block_tables: Tensor
    """int32 or int64."""
    slot_mapping: Tensor
    """int64."""
    spans: tuple[Span, ...] | None
    """Of each sequence, on the host; None where only the device knows them."""
    num_decodes: int = 0

    def host_spans(self) -> tuple[Span, ...]:
        """`spans`, if need be read from the device."""
        if self.spans is not None:
            return self.spans
        decodes = list(range(self.num_decodes))
        starts = decodes + [self.num_decodes + start for start in self.query_starts.tolist()]
        return tuple(zip(starts, starts[1:], self.context_lens.tolist(), strict=False))
