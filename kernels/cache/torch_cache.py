"""The functions of cache_write.py, block_copy.py and swap.py in torch, for any device.

Names, signatures and results are the same. The CPU engine uses them, and tests compare with them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cache.cache_table import CacheTable

E4M3_MAX = 448.0


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Write token t's K and V into slot `slot_mapping[t]`; skip negative slots (padding).

    key, value: [T, kv_heads, head_dim]. caches: [blocks, block_size, kv_heads, head_dim], changed
    in place. They have the type of `key` and `value`, or hold value / scale in fp8 e4m3
    (float8_e4m3fn, or its codes in uint8). slot_mapping: [T], without duplicates.
    """
    is_token = slot_mapping >= 0
    if not is_token.all():
        key, value, slot_mapping = key[is_token], value[is_token], slot_mapping[is_token]
    _write(key, key_cache, slot_mapping, key_scale)
    _write(value, value_cache, slot_mapping, value_scale)


def copy_blocks(table: CacheTable, pairs: Tensor) -> None:
    """Copy block pairs[p, 0] to block pairs[p, 1] in every cache of the table."""
    source, target = pairs.long().unbind(1)
    for cache in table.caches:
        cache[target] = cache[source]


def gather_blocks(table: CacheTable, block_ids: Tensor, staging: Tensor) -> None:
    """Copy block block_ids[b] of all caches into row b of `staging` [>= B, words_per_block]."""
    for row, block in enumerate(block_ids.tolist()):
        parts = [_words(cache[block]) for cache in table.caches]
        torch.cat(parts, out=staging[row])


def scatter_blocks(table: CacheTable, block_ids: Tensor, staging: Tensor) -> None:
    """Copy row b of `staging` into block block_ids[b] of all caches."""
    sizes = table.sizes.tolist()
    for row, block in enumerate(block_ids.tolist()):
        for cache, part in zip(table.caches, staging[row].split(sizes), strict=True):
            _words(cache[block]).copy_(part)


def _write(rows: Tensor, cache: Tensor, slots: Tensor, scale: float) -> None:
    if rows.shape[-1] == 0:  # V is a part of K
        return
    if cache.dtype != rows.dtype:
        # Index bytes: torch does not index fp8 on every device.
        rows = rows.float().mul(1.0 / scale).clamp(-E4M3_MAX, E4M3_MAX)
        rows, cache = rows.to(torch.float8_e4m3fn).view(torch.uint8), cache.view(torch.uint8)
    if cache.is_contiguous():
        cache.view(-1, *rows.shape[1:]).index_copy_(0, slots.long(), rows)
    else:
        block_size = cache.shape[1]
        cache[slots // block_size, slots % block_size] = rows


def _words(block: Tensor) -> Tensor:
    """View a dense block as [words] int64, in memory order."""
    flat = block.as_strided((block.numel(),), (1,))
    return flat.view(torch.int64)
