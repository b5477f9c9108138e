"""Writes new K and V into their slots of the paged cache, converted to fp8 if the cache is fp8."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import stride
from kernels.fp8 import to_cache_type
from kernels.launch_plan import LaunchPlan, planned


@triton.jit
def write_rows(
    source,
    target,
    first_head,
    scale,
    source_head_stride,
    target_head_stride,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HEADS_PER_TILE: tl.constexpr,
    DIM_TILE: tl.constexpr,
):
    """Copy HEADS_PER_TILE heads of one token into its slot, converted to the cache's type."""
    heads = first_head + tl.arange(0, HEADS_PER_TILE)[:, None]
    dims = tl.arange(0, DIM_TILE)[None, :]
    is_inside = (heads < NUM_HEADS) & (dims < DIM)
    rows = tl.load(source + heads * source_head_stride + dims, mask=is_inside)
    rows = to_cache_type(rows, scale, target.dtype.element_ty)
    tl.store(target + heads * target_head_stride + dims, rows, mask=is_inside)


@triton.jit
def write_kv_kernel(
    key,
    value,
    key_cache,
    value_cache,
    slot_mapping,
    inverse_key_scale,
    inverse_value_scale,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    key_block_stride,
    key_slot_stride,
    key_cache_head_stride,
    value_block_stride,
    value_slot_stride,
    value_cache_head_stride,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEADS_PER_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
):
    """Program (t, h) writes K and V of the h-th group of HEADS_PER_TILE heads of token t."""
    token = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1) * HEADS_PER_TILE
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot < 0:
        return
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    write_rows(
        key + token * key_token_stride,
        key_cache + block * key_block_stride + offset * key_slot_stride,
        first_head, inverse_key_scale, key_head_stride, key_cache_head_stride,
        NUM_HEADS, KEY_DIM, HEADS_PER_TILE, KEY_TILE,
    )
    write_rows(
        value + token * value_token_stride,
        value_cache + block * value_block_stride + offset * value_slot_stride,
        first_head, inverse_value_scale, value_head_stride, value_cache_head_stride,
        NUM_HEADS, VALUE_DIM, HEADS_PER_TILE, VALUE_TILE,
    )


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

    key: [T, kv_heads, key_dim]; value: [T, kv_heads, value_dim]; bf16, fp16 or fp32, rows
    contiguous, other strides are free. Caches: [blocks, block_size, kv_heads, dim], changed in
    place. Their strides are equally free, so blocks may be [kv_heads, block_size] in memory. They
    have the rows' type, or are fp8 e4m3, stored as uint8 (any GPU) or float8_e4m3fn (sm_89 and
    newer). An fp8 cache holds value / scale, saturated at ±448. slot_mapping: [T] int32 or int64,
    without duplicates. Raises ValueError for other types and strides.
    """
    grid, scalars, options = _plan(key, value, key_cache, value_cache)
    if grid[0]:
        write_kv_kernel[grid](
            key, value, key_cache, value_cache, slot_mapping, 1.0 / key_scale, 1.0 / value_scale,
            *scalars, **options,
        )


@planned
def _plan(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor) -> LaunchPlan:
    check_rows(key, key_cache)
    check_rows(value, value_cache)
    num_tokens, num_heads, key_dim = key.shape
    value_dim = value.shape[2]
    key_tile, value_tile = triton.next_power_of_2(key_dim), triton.next_power_of_2(value_dim)
    heads_per_tile = min(triton.next_power_of_2(num_heads), max(1, 1024 // key_tile))
    # One thread per 16-byte store.
    num_threads = heads_per_tile * key_tile * key_cache.dtype.itemsize // 16
    return LaunchPlan(
        (num_tokens, triton.cdiv(num_heads, heads_per_tile)),
        (
            *(stride(rows, dim) for rows in (key, value) for dim in range(2)),
            *(stride(cache, dim) for cache in (key_cache, value_cache) for dim in range(3)),
        ),
        {
            "BLOCK_SIZE": key_cache.shape[1],
            "NUM_HEADS": num_heads,
            "KEY_DIM": key_dim,
            "VALUE_DIM": value_dim,
            "HEADS_PER_TILE": heads_per_tile,
            "KEY_TILE": key_tile,
            "VALUE_TILE": value_tile,
            "num_warps": min(4, max(1, num_threads // 32)),
        },
    )


def check_rows(rows: Tensor, cache: Tensor) -> None:
    """Raise ValueError if `rows` [T, heads, dim] cannot be written into `cache`."""
    if cache.dtype not in (rows.dtype, torch.uint8, torch.float8_e4m3fn):
        raise ValueError(f"cannot write {rows.dtype} into a cache of {cache.dtype}")
    if rows.stride(2) != 1 or cache.stride(3) != 1:
        raise ValueError(
            f"rows must be contiguous, got strides {rows.stride()} and, of the cache, "
            f"{cache.stride()}"
        )
