"""Caches for tests: in either memory layout, with poison in all unwritten slots."""

from __future__ import annotations

import torch
from torch import Tensor

POISON = 0x7F  # NaN in fp8; in wider floats, several such bytes are NaN or a huge number


def make_cache(
    num_blocks: int, block_size: int, num_heads: int, dim: int, dtype: torch.dtype, layout: str
) -> Tensor:
    """Return [blocks, block_size, heads, dim] full of poison, as NHD or as a view of HND memory."""
    inner = (num_heads, block_size) if layout == "HND" else (block_size, num_heads)
    num_bytes = num_blocks * block_size * num_heads * dim * dtype.itemsize
    cache = torch.full((num_bytes,), POISON, dtype=torch.uint8).view(dtype)
    cache = cache.view(num_blocks, *inner, dim)
    return cache.transpose(1, 2) if layout == "HND" else cache


def bits(tensor: Tensor) -> Tensor:
    """Return the bits, for exact comparisons: NaN equals NaN, -0 is not 0."""
    return tensor.contiguous().view(torch.uint8)
