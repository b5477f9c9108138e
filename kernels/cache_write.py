"""Writes new K and V into their slots of the paged cache, as fp8 where the cache is fp8."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.fp8 import e4m3_encode
from kernels.paged_arguments import stride
from kernels.plan import Plan, planned


@triton.jit
def _write_rows(
    source,
    cache,
    token,
    block,
    offset,
    first_head,
    scale,
    source_token_stride,
    source_head_stride,
    cache_block_stride,
    cache_slot_stride,
    cache_head_stride,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HEADS_PER_TILE: tl.constexpr,
    DIM_TILE: tl.constexpr,
):
    """Some heads of one token, scaled and converted to the cache's type."""
    heads = first_head + tl.arange(0, HEADS_PER_TILE)[:, None]
    dims = tl.arange(0, DIM_TILE)[None, :]
    is_inside = (heads < NUM_HEADS) & (dims < DIM)
    source += token.to(tl.int64) * source_token_stride
    rows = tl.load(source + heads * source_head_stride + dims, mask=is_inside)
    if cache.dtype.element_ty == tl.uint8:
        rows = e4m3_encode(rows.to(tl.float32) * scale)
    elif cache.dtype.element_ty == tl.float8e4nv:
        rows = (rows.to(tl.float32) * scale).to(tl.float8e4nv)
    cache += block * cache_block_stride + offset * cache_slot_stride
    tl.store(cache + heads * cache_head_stride + dims, rows, mask=is_inside)


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
    """Program (t, h): K and V of the h-th HEADS_PER_TILE heads of token t."""
    token = tl.program_id(0)
    first_head = tl.program_id(1) * HEADS_PER_TILE
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot < 0:
        return
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    _write_rows(
        key, key_cache, token, block, offset, first_head, inverse_key_scale,
        key_token_stride, key_head_stride,
        key_block_stride, key_slot_stride, key_cache_head_stride,
        NUM_HEADS, KEY_DIM, HEADS_PER_TILE, KEY_TILE,
    )  # fmt: skip
    _write_rows(
        value, value_cache, token, block, offset, first_head, inverse_value_scale,
        value_token_stride, value_head_stride,
        value_block_stride, value_slot_stride, value_cache_head_stride,
        NUM_HEADS, VALUE_DIM, HEADS_PER_TILE, VALUE_TILE,
    )  # fmt: skip


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
    """Token t's K and V go to slot `slot_mapping[t]`; a negative slot (padding) is skipped.

    key [T, kv_heads, key_dim], value [T, kv_heads, value_dim]: bf16, fp16 or fp32, any strides but
    rows contiguous. Caches [blocks, block_size, kv_heads, dim], changed in place, likewise strided
    (so blocks may be [kv_heads, block_size] in memory): of the same type, or fp8 e4m3 as uint8
    (any GPU) or float8_e4m3fn (sm_89 and newer), holding value / scale, saturated at ±448.
    slot_mapping [T] int32 or int64, no slot twice. Raises ValueError on other types and strides.
    """
    grid, numbers, options = _plan(key, value, key_cache, value_cache)
    if grid[0]:
        write_kv_kernel[grid](
            key, value, key_cache, value_cache, slot_mapping, 1.0 / key_scale, 1.0 / value_scale,
            *numbers, **options,
        )  # fmt: skip


@planned
def _plan(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor) -> Plan:
    _check(key, key_cache)
    _check(value, value_cache)
    num_tokens, num_heads, key_dim = key.shape
    value_dim = value.shape[2]
    key_tile, value_tile = triton.next_power_of_2(key_dim), triton.next_power_of_2(value_dim)
    heads_per_tile = min(triton.next_power_of_2(num_heads), max(1, 1024 // key_tile))
    # As many threads as there are 16-byte stores.
    num_threads = heads_per_tile * key_tile * key_cache.dtype.itemsize // 16
    return Plan(
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


def _check(rows: Tensor, cache: Tensor) -> None:
    if cache.dtype not in (rows.dtype, torch.uint8, torch.float8_e4m3fn):
        raise ValueError(f"cannot write {rows.dtype} into a cache of {cache.dtype}")
    if rows.stride(2) != 1 or cache.stride(3) != 1:
        raise ValueError(f"rows must be contiguous, got {rows.stride()} and {cache.stride()}")
