"""The new tokens of one step's sequences and the slots of their states.

A layer with state keeps numbers of a fixed size for each sequence, in a slot of a pool, where an
attention layer keeps K and V of every token.

```
tokens          | a | b | c c c c | d d |    T = 8 tokens of N = 4 sequences
num_decodes     2                            a and b come first, with one token each
starts            0   1   2         6   8    [N + 1], the rows of each sequence
reads             5  -1   3         7        [N], the slot of the state before the first token
writes            5   6   - - 9 3   - 8      [T], the slot that gets the state after this token
```

`-` is -1. A sequence that reads slot -1 begins with a state of zeros. A state that is written to no
slot is lost, as that of padding must be. A sequence may read and write the same slot (a), read a
slot that others read, too, and write another one (d), and leave a copy behind (c, in slot 9, of the
state after three of its four tokens). So sequences share states, keep earlier ones and roll back
without copying any.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StateBatch:
    """The new tokens of several sequences. All tensors are on the pool's device.

    No slot is written twice, nor read by one sequence and written by another.
    """

    starts: Tensor
    """int32."""
    reads: Tensor
    """int64."""
    writes: Tensor
    """int64."""
    spans: tuple[tuple[int, int], ...] | None
    """Start and end (exclusive) of each sequence's rows, on the host; None if only the device has
    them."""
    num_decodes: int = 0

    def host_spans(self) -> tuple[tuple[int, int], ...]:
        """Return `spans`, read from the device if they are not on the host."""
        if self.spans is not None:
            return self.spans
        return tuple(itertools.pairwise(self.starts.tolist()))
