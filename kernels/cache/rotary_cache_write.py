"""Rotary position embedding and the write into the paged KV cache, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import stride
from kernels.cache.cache_write import check_rows, write_rows
from kernels.elementwise.rotary import ROUNDED, rotary_tiling, rotate_heads
from kernels.launch_plan import LaunchPlan, planned


@triton.jit
def rotary_write_kv_kernel(
    query, key, value, cos, sin, key_cache, value_cache, slot_mapping,
    inverse_key_scale, inverse_value_scale,
    query_token_stride, query_head_stride, key_token_stride, key_head_stride,
    value_token_stride, value_head_stride, cos_token_stride, sin_token_stride,
    key_block_stride, key_slot_stride, key_cache_head_stride,
    value_block_stride, value_slot_stride, value_cache_head_stride,
    BLOCK_SIZE: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr, ANGLE_OFFSET: tl.constexpr, REST: tl.constexpr, VALUE_DIM: tl.constexpr,
    HEADS_PER_TILE: tl.constexpr, HALF_TILE: tl.constexpr,
    REST_TILE: tl.constexpr, VALUE_TILE: tl.constexpr,
):
    """Program (t, i) handles the i-th group of HEADS_PER_TILE heads of token t.

    Query heads come first, then KV heads. REST: number of dims of a key that are not rotated.
    """
    QUERY_TILES: tl.constexpr = (NUM_HEADS + HEADS_PER_TILE - 1) // HEADS_PER_TILE
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cos += token * cos_token_stride
    sin += token * sin_token_stride
    if tile < QUERY_TILES:
        rows = query + token * query_token_stride
        rotate_heads(
            rows, rows, cos, sin, tile * HEADS_PER_TILE, 1.0, query_head_stride, query_head_stride,
            NUM_HEADS, HALF, ANGLE_OFFSET, HEADS_PER_TILE, HALF_TILE,
        )
        return
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot < 0:
        return
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    first_head = (tile - QUERY_TILES) * HEADS_PER_TILE
    key += token * key_token_stride
    key_cache += block * key_block_stride + offset * key_slot_stride
    rotate_heads(
        key, key_cache, cos, sin, first_head, inverse_key_scale,
        key_head_stride, key_cache_head_stride,
        NUM_KV_HEADS, HALF, ANGLE_OFFSET, HEADS_PER_TILE, HALF_TILE,
    )
    if REST > 0:
        write_rows(
            key + 2 * HALF, key_cache + 2 * HALF, first_head, inverse_key_scale,
            key_head_stride, key_cache_head_stride,
            NUM_KV_HEADS, REST, HEADS_PER_TILE, REST_TILE,
        )
    write_rows(
        value + token * value_token_stride,
        value_cache + block * value_block_stride + offset * value_slot_stride,
        first_head, inverse_value_scale, value_head_stride, value_cache_head_stride,
        NUM_KV_HEADS, VALUE_DIM, HEADS_PER_TILE, VALUE_TILE,
    )


def rotary_write_kv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    rotary_dim: int,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Rotate queries in place, and write rotated keys and the values into their cache slots.

    Queries and caches are bitwise the same as after `kernels.elementwise.rotary.rotary` and
    `kernels.cache.cache_write.write_kv`: keys are rounded to their own type before they become fp8.
    Unlike `rotary`, this leaves `key` as it is; only the cache holds rotated keys. A token with a
    negative slot (padding) writes nothing to the caches.

    query, key, cos, sin, rotary_dim: as in `rotary`. value, caches, slot_mapping, scales: as in
    `write_kv`. Raises ValueError for the shapes, types and strides that these functions refuse.
    """
    grid, scalars, options = _plan(query, key, value, cos, sin, rotary_dim, key_cache, value_cache)
    if grid[0]:
        rotary_write_kv_kernel[grid](
            query, key, value, cos, sin, key_cache, value_cache, slot_mapping,
            1.0 / key_scale, 1.0 / value_scale, *scalars, **options,
        )


@planned
def _plan(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int,
    key_cache: Tensor, value_cache: Tensor,
) -> LaunchPlan:
    check_rows(key, key_cache)
    check_rows(value, value_cache)
    tiling = rotary_tiling(query, key, cos, sin, rotary_dim)
    heads_per_tile, half_tile = tiling["HEADS_PER_TILE"], tiling["HALF_TILE"]
    num_tokens, num_heads, _ = query.shape
    num_kv_heads, key_dim = key.shape[1:]
    # The two halves of a tile's rotated keys are stored one after the other, with one thread for
    # every 16 bytes of a half. In an fp8 cache, an element counts as 2 bytes: a thread with 16
    # elements would need twice as many registers, and Triton 3.6.0 would move some through shared
    # memory or the stack.
    element_bytes = max(key_cache.dtype.itemsize, 2)
    num_threads = heads_per_tile * half_tile * element_bytes // 16
    return LaunchPlan(
        (
            num_tokens,
            sum(triton.cdiv(count, heads_per_tile) for count in (num_heads, num_kv_heads)),
        ),
        (
            *(stride(rows, dim) for rows in (query, key, value) for dim in range(2)),
            stride(cos, 0),
            stride(sin, 0),
            *(stride(cache, dim) for cache in (key_cache, value_cache) for dim in range(3)),
        ),
        tiling
        | ROUNDED
        | {
            "BLOCK_SIZE": key_cache.shape[1],
            "REST": key_dim - rotary_dim,
            "VALUE_DIM": value.shape[2],
            "REST_TILE": triton.next_power_of_2(max(1, key_dim - rotary_dim)),
            "VALUE_TILE": triton.next_power_of_2(value.shape[2]),
            "num_warps": min(4, max(1, num_threads // 32)),
        },
    )
