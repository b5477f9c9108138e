"""Rotary position embedding of queries and keys, in place, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.paged_arguments import stride
from kernels.plan import Plan, planned

TILE = 1024


@triton.jit
def _rotate_heads(
    rows,
    cos,
    sin,
    first_head,
    head_stride,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    SECOND: tl.constexpr,
    HEADS_PER_TILE: tl.constexpr,
    HALF_TILE: tl.constexpr,
):
    """Some heads of one token; each product and the sum are rounded, as by torch operations."""
    heads = first_head + tl.arange(0, HEADS_PER_TILE)[:, None]
    dims = tl.arange(0, HALF_TILE)[None, :]
    is_inside = (heads < NUM_HEADS) & (dims < HALF)
    places = rows + heads * head_stride + dims
    dtype = rows.dtype.element_ty
    first = tl.load(places, mask=is_inside, other=0.0).to(tl.float32)
    second = tl.load(places + HALF, mask=is_inside, other=0.0).to(tl.float32)
    # For each head again, from L1: as one row they would be read 2 bytes a thread.
    angles = tl.broadcast_to(dims, HEADS_PER_TILE, HALF_TILE)
    first_cos = tl.load(cos + angles, mask=is_inside, other=0.0).to(tl.float32)
    first_sin = tl.load(sin + angles, mask=is_inside, other=0.0).to(tl.float32)
    second_cos = tl.load(cos + SECOND + angles, mask=is_inside, other=0.0).to(tl.float32)
    second_sin = tl.load(sin + SECOND + angles, mask=is_inside, other=0.0).to(tl.float32)
    turned = (first * first_cos).to(dtype).to(tl.float32)
    turned -= (second * first_sin).to(dtype).to(tl.float32)
    tl.store(places, turned.to(dtype), mask=is_inside)
    turned = (second * second_cos).to(dtype).to(tl.float32)
    turned += (first * second_sin).to(dtype).to(tl.float32)
    tl.store(places + HALF, turned.to(dtype), mask=is_inside)


@triton.jit
def rotary_kernel(
    query,
    key,
    cos,
    sin,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    cos_token_stride,
    sin_token_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    SECOND: tl.constexpr,
    HEADS_PER_TILE: tl.constexpr,
    HALF_TILE: tl.constexpr,
):
    """Program (t, i): the i-th HEADS_PER_TILE heads of token t, those of the query first."""
    QUERY_TILES: tl.constexpr = (NUM_HEADS + HEADS_PER_TILE - 1) // HEADS_PER_TILE
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cos += token * cos_token_stride
    sin += token * sin_token_stride
    if tile < QUERY_TILES:
        _rotate_heads(
            query + token * query_token_stride, cos, sin, tile * HEADS_PER_TILE,
            query_head_stride, NUM_HEADS, HALF, SECOND, HEADS_PER_TILE, HALF_TILE,
        )  # fmt: skip
    else:
        _rotate_heads(
            key + token * key_token_stride, cos, sin, (tile - QUERY_TILES) * HEADS_PER_TILE,
            key_head_stride, NUM_KV_HEADS, HALF, SECOND, HEADS_PER_TILE, HALF_TILE,
        )  # fmt: skip


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int) -> None:
    """Turns the first `rotary_dim` dims of each head of each token, in place.

    Dims i and i + rotary_dim / 2 are a pair, as in GPT-NeoX and Llama («rotate half»):

        x[i], x[i + half] = x[i] * cos[i] - x[i + half] * sin[i],
                            x[i + half] * cos[i + half] + x[i] * sin[i + half]

    query [T, heads, head_dim], key [T, kv_heads, head_dim], any strides but rows contiguous and
    nothing twice in memory; cos, sin [T, rotary_dim], or [T, rotary_dim / 2] where one half serves
    both; all of one type, fp16, bf16 or fp32. Raises ValueError for others.
    """
    grid, numbers, options = _plan(query, key, cos, sin, rotary_dim)
    if grid[0]:
        rotary_kernel[grid](query, key, cos, sin, *numbers, **options)


@planned
def _plan(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int) -> Plan:
    for rows in (query, key):
        _check(rows, cos, sin, rotary_dim)
    (num_tokens, num_heads, _), num_kv_heads = query.shape, key.shape[1]
    half = rotary_dim // 2
    half_tile = triton.next_power_of_2(half)
    most_heads = triton.next_power_of_2(max(num_heads, num_kv_heads))
    heads_per_tile = min(most_heads, max(1, TILE // half_tile))
    num_tiles = triton.cdiv(num_heads, heads_per_tile) + triton.cdiv(num_kv_heads, heads_per_tile)
    return Plan(
        (num_tokens, num_tiles),
        (
            *(stride(rows, dim) for rows in (query, key) for dim in range(2)),
            stride(cos, 0),
            stride(sin, 0),
        ),
        {
            "NUM_HEADS": num_heads,
            "NUM_KV_HEADS": num_kv_heads,
            "HALF": half,
            "SECOND": half if cos.shape[1] == rotary_dim else 0,
            "HEADS_PER_TILE": heads_per_tile,
            "HALF_TILE": half_tile,
            "num_warps": min(4, max(1, heads_per_tile * half_tile // 256)),
        },
    )


def _check(rows: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int) -> None:
    num_tokens, num_heads, head_dim = rows.shape
    widths = (rotary_dim, rotary_dim // 2)
    if cos.shape != sin.shape or cos.shape[0] != num_tokens or cos.shape[1] not in widths:
        raise ValueError(
            f"cos {list(cos.shape)} and sin {list(sin.shape)} for {num_tokens} tokens and "
            f"{rotary_dim} dims; they must be [tokens, dims or half of them]"
        )
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise ValueError(f"{rotary_dim} of {head_dim} dims; it must be even and no more than these")
    if not rows.dtype == cos.dtype == sin.dtype:
        raise ValueError(f"rows are {rows.dtype}, cos {cos.dtype}, sin {sin.dtype}; use one type")
    is_repeated = num_heads > 1 and rows.stride(1) == 0
    if is_repeated or any(each.stride(-1) != 1 for each in (rows, cos, sin)):
        raise ValueError(
            f"rows have strides {rows.stride()}, cos {cos.stride()}, sin {sin.stride()}; the last "
            "must be 1 and no head another's memory"
        )
