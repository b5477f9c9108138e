"""Addresses of all layers' blocks, for kernels that move whole blocks of every layer at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

WORD_BYTES = 8


@dataclass(frozen=True, slots=True)
class CacheTable:
    """K and V tensors of all layers; a block id stands for the same tokens in each of them.

    ```
    staging row of a block   | keys 0 | values 0 | keys 1 | ...      words_per_block words of int64
                             0        starts[1]  starts[2]
    ```
    """

    caches: tuple[Tensor, ...]
    """C tensors [blocks, ...]; each block is one dense run of memory."""
    addresses: Tensor
    """[C] int64, on the caches' device: addresses of block 0."""
    strides: Tensor
    """[C] int64: words from one block to the next."""
    sizes: Tensor
    """[C] int64: words in a block."""
    starts: Tensor
    """[C] int64: offset in words of this tensor's part in a staging row."""
    largest_size: int
    """Most words in a block of any tensor."""
    words_per_block: int
    """Words in a block over all tensors."""


@dataclass(frozen=True, slots=True)
class BlockKernels:
    """Functions that move whole KV blocks of all layers."""

    copy: Callable[[CacheTable, Tensor], None]
    """copy(table, pairs): copy block pairs[p, 0] to block pairs[p, 1]."""
    gather: Callable[[CacheTable, Tensor, Tensor], None]
    """gather(table, block_ids, staging): copy block block_ids[b] into row b of `staging`."""
    scatter: Callable[[CacheTable, Tensor, Tensor], None]
    """scatter(table, block_ids, staging): copy row b of `staging` into block block_ids[b]."""


def cache_table(caches: Sequence[Tensor]) -> CacheTable:
    """Return the table of these tensors, which must outlive it.

    Raises ValueError if blocks are not dense or not aligned to 16 bytes.
    """
    for cache in caches:
        _check(cache)
    sizes = [cache[0].nbytes // WORD_BYTES for cache in caches]
    strides = [cache.stride(0) * cache.element_size() // WORD_BYTES for cache in caches]
    *starts, total = accumulate(sizes, initial=0)

    def tensor(numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=caches[0].device)

    return CacheTable(
        caches=tuple(caches),
        addresses=tensor([cache.data_ptr() for cache in caches]),
        strides=tensor(strides),
        sizes=tensor(sizes),
        starts=tensor(starts),
        largest_size=max(sizes),
        words_per_block=total,
    )


def _check(cache: Tensor) -> None:
    """Check that kernels can move 16 bytes at a time; NHD and HND blocks are both fine."""
    block = cache[0]
    pairs = zip(block.shape, block.stride(), strict=True)
    if sum((size - 1) * stride for size, stride in pairs) != block.numel() - 1:
        raise ValueError(f"blocks must be dense, got strides {cache.stride()} of {cache.shape}")
    step = cache.stride(0) * cache.element_size()
    if cache.data_ptr() % 16 or block.nbytes % 16 or step % 16:
        raise ValueError(
            f"blocks must be aligned to 16 bytes, got blocks of {block.nbytes} bytes, {step} bytes "
            f"apart, from address {cache.data_ptr():#x} on"
        )
