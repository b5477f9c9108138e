"""The layout of one step in KV memory, as the attention functions take it.

```
row of tokens   | a a a a | b | c c |          T = 7 tokens of N = 3 sequences, never padded
query_starts    0         4   5     7          [N + 1]
context_lens    4         9   6                [N], tokens of K/V each may see, its own included
block_tables    [[3, 0], [1, 5], [2, 4]]       [N, B], entries past a sequence's end are 0
slot_mapping    where each token's K/V go      [T], block * block_size + offset
```
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Chunks of several sequences as one flat row. Each tensor lives on the K/V's device."""

    query_starts: Tensor
    """[N + 1] int32."""
    context_lens: Tensor
    """[N] int32."""
    block_tables: Tensor
    """[N, B] int64."""
    slot_mapping: Tensor
    """[T] int64."""
    spans: tuple[tuple[int, int, int], ...]
    """Per sequence, on the host: first and past-last token of its chunk, and context length."""
