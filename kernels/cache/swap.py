"""Moves blocks of all layers to and from one contiguous buffer, which is copied to the host."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.cache.cache_table import CacheTable


@triton.jit
def swap_kernel(
    addresses,
    strides,
    sizes,
    starts,
    block_ids,
    staging,
    row_words,
    IS_GATHER: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (b, c, i) copies the i-th tile of TILE words of the b-th block in cache c."""
    cache = tl.program_id(1)
    size = tl.load(sizes + cache)
    words = tl.program_id(2) * TILE + tl.arange(0, TILE)
    if tl.program_id(2) * TILE >= size:
        return
    # `cache_table` checks what the compiler cannot know: addresses are multiples of 16 bytes, and
    # strides and sizes are even numbers of words. So the starts are even, too.
    base = tl.multiple_of(tl.load(addresses + cache).to(tl.pointer_type(tl.int64)), 16)
    stride = tl.multiple_of(tl.load(strides + cache), 2)
    start = tl.multiple_of(tl.load(starts + cache), 2)
    is_inside = words < tl.multiple_of(size, 2)
    in_cache = base + tl.load(block_ids + tl.program_id(0)).to(tl.int64) * stride + words
    row = tl.program_id(0).to(tl.int64) * row_words
    in_staging = staging + tl.multiple_of(row, 2) + start + words
    if IS_GATHER:
        tl.store(in_staging, tl.load(in_cache, mask=is_inside), mask=is_inside)
    else:
        tl.store(in_cache, tl.load(in_staging, mask=is_inside), mask=is_inside)


def gather_blocks(table: CacheTable, block_ids: Tensor, staging: Tensor) -> None:
    """Copy block block_ids[b] of every cache, one after another, into row b of `staging`.

    block_ids: [B] int32 or int64 on the caches' device; staging: [>= B, table.words_per_block]
    int64, contiguous, on the same device. Raises ValueError for other buffers.
    """
    _swap(table, block_ids, staging, is_gather=True)


def scatter_blocks(table: CacheTable, block_ids: Tensor, staging: Tensor) -> None:
    """Copy row b of `staging` back into block block_ids[b] of every cache. Ids must be unique."""
    _swap(table, block_ids, staging, is_gather=False)


def _swap(table: CacheTable, block_ids: Tensor, staging: Tensor, *, is_gather: bool) -> None:
    num_blocks, row_words = len(block_ids), table.words_per_block
    if not staging.is_contiguous() or staging.shape[0] < num_blocks:
        raise ValueError(f"staging must be contiguous with {num_blocks} rows, got {staging.shape}")
    if staging.element_size() != 8 or staging.shape[1] != row_words:
        raise ValueError(f"staging must have rows of {row_words} int64, got {staging.shape}")
    if not num_blocks:
        return
    tile = 1024
    swap_kernel[(num_blocks, len(table.caches), triton.cdiv(table.largest_size, tile))](
        table.addresses, table.strides, table.sizes, table.starts, block_ids, staging, row_words,
        IS_GATHER=is_gather,
        TILE=tile,
    )
