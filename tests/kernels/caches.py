"""Caches for tests: one block layout or the other in memory, poison wherever nothing is written."""

from __future__ import annotations

import torch
from torch import Tensor

POISON = 0x7F  # NaN in fp8; in wider floats four or two such bytes are NaN or a huge number


def make_cache(
    num_blocks: int, block_size: int, num_heads: int, dim: int, dtype: torch.dtype, layout: str
) -> Tensor:
    """[blocks, block_size, heads, dim] full of poison, as NHD or as a view of HND memory."""
    inner = (num_heads, block_size) if layout == "HND" else (block_size, num_heads)
    num_bytes = num_blocks * block_size * num_heads * dim * dtype.itemsize
    cache = torch.full((num_bytes,), POISON, dtype=torch.uint8).view(dtype)
    cache = cache.view(num_blocks, *inner, dim)
    return cache.transpose(1, 2) if layout == "HND" else cache


def bits(tensor: Tensor) -> Tensor:
    """For comparisons that tell every bit: NaN equals NaN, -0 is not 0."""
    return tensor.contiguous().view(torch.uint8)
