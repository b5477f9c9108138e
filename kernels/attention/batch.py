"""The new tokens of one step's sequences and their places in the KV cache, for attention.

```
tokens          | a | b | c c c c | d d |    T = 8 tokens of N = 4 sequences
num_decodes     2                            a and b come first, with one token each
query_starts            0         4     6    [N - num_decodes + 1], counted from the first c
context_lens    9   6   4         11         [N], tokens in the context, new ones included
block_tables    [[3, 0], [1, 5], [2, 0] ...] [N, B], entries past a context's end are not read
slot_mapping    slot of each token's K and V [T], block * block_size + offset
```

Where a model has several cache groups, a step has a batch for each. They differ in block_tables and
slot_mapping.

A captured CUDA graph runs a fixed number of tokens, so a smaller batch is padded in two places. A
padding decode has a context of 0 and a slot of -1: nothing is read or written for it, and its
attention output is zero. More padding tokens follow the last prompt. Their output is undefined.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from kernels.state.batch import StateBatch


class ImageSpan(NamedTuple):
    """New tokens of a sequence that belong to one image and attend to each other both ways."""

    sequence: int
    """The sequence's index in the batch."""
    start: int
    """Index of the image's first new token, among all tokens of the batch."""
    end: int
    """Index after the image's last token, which is also new."""
    context_len: int
    """Tokens in the sequence up to the image's end."""


QuerySpan = tuple[int, int, int]
"""Start and end (exclusive) of a sequence's new tokens among all tokens, and its context length."""


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """The new tokens of several sequences. All tensors are on the KV cache's device."""

    query_starts: Tensor
    """int32."""
    context_lens: Tensor
    """int32."""
    block_tables: Tensor
    """int32 or int64."""
    slot_mapping: Tensor
    """int64."""
    spans: tuple[QuerySpan, ...] | None
    """One per sequence, on the host; None if only the device has them."""
    num_decodes: int = 0
    images: tuple[ImageSpan, ...] = ()
    """The tokens whose attention is not causal. Kernels treat all tokens as causal, and then
    `kernels.attention.sdpa.attend_in_images` computes these rows again."""
    states: StateBatch | None = None
    """The same tokens, for layers with a state; None if the model has none."""
    in_prompt: Tensor | None = None
    """[T] bool: whether a token belongs to its sequence's prompt. Only where there are states."""

    def with_tables(self, block_tables: Tensor, slot_mapping: Tensor) -> PagedBatch:
        """Return the batch in another cache group."""
        return replace(self, block_tables=block_tables, slot_mapping=slot_mapping)

    def host_spans(self) -> tuple[QuerySpan, ...]:
        """Return `spans`, read from the device if they are not on the host."""
        if self.spans is not None:
            return self.spans
        decodes = list(range(self.num_decodes))
        starts = decodes + [self.num_decodes + start for start in self.query_starts.tolist()]
        return tuple(zip(starts, starts[1:], self.context_lens.tolist(), strict=False))
