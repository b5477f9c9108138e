"""K and V of every head from latents (DeepSeek-V2's attention), for prompts."""

from __future__ import annotations

import torch
from torch import Tensor


def expand_latents(rows: Tensor, key_up: Tensor, value_up: Tensor) -> Tensor:
    """Return K and V, [N, heads, nope + rope + value], of rows [N, rank + rope].

    key_up: [heads, nope, rank]. value_up: [heads, rank, value]. The last `rope` numbers of a row
    are the rotated part of K, the same in all heads.
    """
    num_heads, nope, rank = key_up.shape
    rope, value = rows.shape[1] - rank, value_up.shape[2]
    out = rows.new_empty(len(rows), num_heads, nope + rope + value)
    plain, rotated, values = out.split_with_sizes([nope, rope, value], -1)
    latents = rows[:, :rank].expand(num_heads, -1, -1)
    torch.bmm(latents, key_up.transpose(1, 2), out=plain.transpose(0, 1))
    torch.bmm(latents, value_up, out=values.transpose(0, 1))
    rotated.copy_(rows[:, None, rank:])
    return out
