"""Copy-on-write for shared blocks: copies whole blocks of all layers in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.cache.cache_table import CacheTable


@triton.jit
def copy_blocks_kernel(addresses, strides, sizes, pairs, TILE: tl.constexpr):
    """Program (p, c, i) copies, for pair p, the i-th tile of TILE words of a block of cache c."""
    cache = tl.program_id(1)
    size = tl.load(sizes + cache)
    words = tl.program_id(2) * TILE + tl.arange(0, TILE)
    if tl.program_id(2) * TILE >= size:
        return
    # `cache_table` checks what the compiler cannot know: addresses are multiples of 16 bytes, and
    # strides and sizes are even numbers of words.
    base = tl.multiple_of(tl.load(addresses + cache).to(tl.pointer_type(tl.int64)), 16)
    stride = tl.multiple_of(tl.load(strides + cache), 2)
    is_inside = words < tl.multiple_of(size, 2)
    source = base + tl.load(pairs + 2 * tl.program_id(0)).to(tl.int64) * stride
    target = base + tl.load(pairs + 2 * tl.program_id(0) + 1).to(tl.int64) * stride
    tl.store(target + words, tl.load(source + words, mask=is_inside), mask=is_inside)


def copy_blocks(table: CacheTable, pairs: Tensor) -> None:
    """Copy block pairs[p, 0] to block pairs[p, 1] in every cache of the table, in place.

    pairs: [P, 2] int32 or int64 on the caches' device. The copies run in any order, so no target
    may be another pair's source or target.
    """
    if not len(pairs):
        return
    tile = 1024
    grid = (len(pairs), len(table.caches), triton.cdiv(table.largest_size, tile))
    copy_blocks_kernel[grid](table.addresses, table.strides, table.sizes, pairs, TILE=tile)
