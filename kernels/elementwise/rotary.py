"""Rotary position embedding of queries and keys, in place, in one launch."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import stride
from kernels.fp8 import to_cache_type
from kernels.launch_plan import LaunchPlan, planned

TILE = 1024
ROUNDED = {"enable_fp_fusion": False}
"""Launch option of kernels with `rotate_heads`. With fused multiply-adds, the compiler would drop
the rounding of one of the two products."""


@triton.jit
def rotate_heads(
    source, target, cos, sin, first_head, scale,
    source_head_stride, target_head_stride,
    NUM_HEADS: tl.constexpr, HALF: tl.constexpr, ANGLE_OFFSET: tl.constexpr,
    HEADS_PER_TILE: tl.constexpr, HALF_TILE: tl.constexpr,
):
    """Rotate HEADS_PER_TILE heads of one token and store them in `target`, which may be `source`.

    Each product and the sum are rounded to the type of `source`, as torch operations round. After
    that, an fp8 target gets the result times `scale`. ANGLE_OFFSET: where cos and sin of the second
    half begin; 0 if both halves share them.
    """
    heads = first_head + tl.arange(0, HEADS_PER_TILE)[:, None]
    dims = tl.arange(0, HALF_TILE)[None, :]
    is_inside = (heads < NUM_HEADS) & (dims < HALF)
    places = source + heads * source_head_stride + dims
    dtype = source.dtype.element_ty
    first = tl.load(places, mask=is_inside, other=0.0).to(tl.float32)
    second = tl.load(places + HALF, mask=is_inside, other=0.0).to(tl.float32)
    # cos and sin are loaded again for each head, from L1. If they were loaded once for all heads,
    # each thread would load only 2 bytes.
    angles = tl.broadcast_to(dims, HEADS_PER_TILE, HALF_TILE)
    first_cos = tl.load(cos + angles, mask=is_inside, other=0.0).to(tl.float32)
    first_sin = tl.load(sin + angles, mask=is_inside, other=0.0).to(tl.float32)
    second_cos = tl.load(cos + ANGLE_OFFSET + angles, mask=is_inside, other=0.0).to(tl.float32)
    second_sin = tl.load(sin + ANGLE_OFFSET + angles, mask=is_inside, other=0.0).to(tl.float32)
    stored = target.dtype.element_ty
    places = target + heads * target_head_stride + dims
    turned = (first * first_cos).to(dtype).to(tl.float32)
    turned -= (second * first_sin).to(dtype).to(tl.float32)
    tl.store(places, to_cache_type(turned.to(dtype), scale, stored), mask=is_inside)
    turned = (second * second_cos).to(dtype).to(tl.float32)
    turned += (first * second_sin).to(dtype).to(tl.float32)
    tl.store(places + HALF, to_cache_type(turned.to(dtype), scale, stored), mask=is_inside)


@triton.jit
def rotary_kernel(
    query, key, cos, sin,
    query_token_stride, query_head_stride, key_token_stride, key_head_stride,
    cos_token_stride, sin_token_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr,
    ANGLE_OFFSET: tl.constexpr, HEADS_PER_TILE: tl.constexpr, HALF_TILE: tl.constexpr,
):
    """Program (t, i) rotates the i-th group of HEADS_PER_TILE heads of token t.

    Query heads come first.
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
    else:
        rows = key + token * key_token_stride
        rotate_heads(
            rows, rows, cos, sin, (tile - QUERY_TILES) * HEADS_PER_TILE, 1.0,
            key_head_stride, key_head_stride,
            NUM_KV_HEADS, HALF, ANGLE_OFFSET, HEADS_PER_TILE, HALF_TILE,
        )


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int) -> None:
    """Rotate the first `rotary_dim` dims of each head of each token, in place.

    Dims i and i + rotary_dim / 2 are a pair, as in GPT-NeoX and Llama ("rotate half"):

        x[i], x[i + half] = x[i] * cos[i] - x[i + half] * sin[i],
                            x[i + half] * cos[i + half] + x[i] * sin[i + half]

    query: [T, heads, head_dim]; key: [T, kv_heads, head_dim]; rows contiguous, other strides are
    free as long as no two heads overlap in memory. cos, sin: [T, rotary_dim], or
    [T, rotary_dim / 2] if both halves share them. All of one type: fp16, bf16 or fp32. Raises
    ValueError for other shapes, strides and types.
    """
    grid, scalars, options = _plan(query, key, cos, sin, rotary_dim)
    if grid[0]:
        rotary_kernel[grid](query, key, cos, sin, *scalars, **options)


@planned
def _plan(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int) -> LaunchPlan:
    tiling = rotary_tiling(query, key, cos, sin, rotary_dim)
    heads_per_tile, half_tile = tiling["HEADS_PER_TILE"], tiling["HALF_TILE"]
    num_tokens, num_heads, _ = query.shape
    num_tiles = sum(triton.cdiv(count, heads_per_tile) for count in (num_heads, key.shape[1]))
    return LaunchPlan(
        (num_tokens, num_tiles),
        (
            *(stride(rows, dim) for rows in (query, key) for dim in range(2)),
            stride(cos, 0),
            stride(sin, 0),
        ),
        tiling | {"num_warps": min(4, max(1, heads_per_tile * half_tile // 256))} | ROUNDED,
    )


def rotary_tiling(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int
) -> dict[str, Any]:
    """Return the constants of `rotate_heads` and the numbers of heads.

    Raises ValueError for arguments that `rotary` refuses.
    """
    for rows in (query, key):
        _check(rows, cos, sin, rotary_dim)
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    half = rotary_dim // 2
    half_tile = triton.next_power_of_2(half)
    max_heads = triton.next_power_of_2(max(num_heads, num_kv_heads))
    return {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HALF": half,
        "ANGLE_OFFSET": half if cos.shape[1] == rotary_dim else 0,
        "HEADS_PER_TILE": min(max_heads, max(1, TILE // half_tile)),
        "HALF_TILE": half_tile,
    }


def _check(rows: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int) -> None:
    num_tokens, num_heads, head_dim = rows.shape
    widths = (rotary_dim, rotary_dim // 2)
    if cos.shape != sin.shape or cos.shape[0] != num_tokens or cos.shape[1] not in widths:
        raise ValueError(
            f"cos {list(cos.shape)} and sin {list(sin.shape)} for {num_tokens} tokens and "
            f"{rotary_dim} dims; both must be [tokens, dims] or [tokens, dims / 2]"
        )
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise ValueError(f"rotary_dim={rotary_dim} must be even, and at most head_dim={head_dim}")
    if not rows.dtype == cos.dtype == sin.dtype:
        raise ValueError(f"rows are {rows.dtype}, cos {cos.dtype}, sin {sin.dtype}; use one type")
    is_repeated = num_heads > 1 and rows.stride(1) == 0
    if is_repeated or any(tensor.stride(-1) != 1 for tensor in (rows, cos, sin)):
        raise ValueError(
            f"rows have strides {rows.stride()}, cos {cos.stride()}, sin {sin.stride()}; the last "
            "must be 1, and heads must not share memory"
        )
