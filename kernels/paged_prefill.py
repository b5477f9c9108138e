"""Paged attention in one launch for sequences with any numbers of new tokens.

A program computes a block of one sequence's query tokens over all keys that they may see
(FlashAttention-2, arXiv 2307.08691). Its tile has one row per token and query head, for heads that
share a KV head. Programs find their sequence on the device, so the grid depends only on the numbers
of tokens and sequences. Whole prompts, chunks after cached prefixes and decodes may be mixed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_tile import block_ids, load_rows, row_offsets, softmax_step
from kernels.configurations import AttentionConfiguration, attention_configuration
from kernels.paged_arguments import check_integers, check_paged_arguments, score_factors, stride
from kernels.plan import Plan, planned


@triton.jit
def find_sequence(starts_ptr, num_sequences, block, BLOCK_Q: tl.constexpr):
    """Return the sequence whose tokens are in block `block`.

    Sequence i begins at block starts[i] // BLOCK_Q + i. Whatever the lengths, this gives each
    sequence the blocks that it needs or one more, so T // BLOCK_Q + N blocks are enough.
    """
    num_begun = 0
    for first in range(0, num_sequences, 128):
        index = first + tl.arange(0, 128)
        starts = tl.load(starts_ptr + index, mask=index < num_sequences, other=0).to(tl.int32)
        has_begun = (index < num_sequences) & (starts // BLOCK_Q + index <= block)
        num_begun += tl.sum(has_begun.to(tl.int32), 0)
    return num_begun - 1


@triton.jit
def attend_tiles(
    attended, row_max, row_sum, blocks, query, key_ptr, value_ptr, table_ptr, position, context_len,
    first_key, begin, end, score_scale, cap, window, block_stride, token_stride,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return the running sums after key tiles [begin, end), and the block ids of tile `end`.

    blocks: the ids of tile `begin`. The ids of a tile are loaded one iteration ahead: if K and V
    addresses depended on a load of the same iteration, Triton's pipeliner would give K and V fewer
    buffers than num_stages. MASKED: some row may not see all keys of a tile.
    """
    for tile in range(begin, end):
        key_position = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        is_stored = key_position < context_len
        is_seen = key_position[None, :] <= position[:, None]
        if window is not None:
            is_stored = is_stored & (key_position >= first_key)
            is_seen = is_seen & (key_position[None, :] > position[:, None] - window)
        rows = row_offsets(blocks, tile, block_stride, token_stride, BLOCK_SIZE, BLOCK_N, PRECISION)
        blocks = block_ids(table_ptr, tile + 1, context_len, BLOCK_SIZE, BLOCK_N)
        keys = load_rows(key_ptr, rows, is_stored, query.dtype, HEAD_DIM, BLOCK_D, MASKED)
        products = tl.dot(query, keys.T, input_precision=PRECISION)
        weights, correction, row_max, row_sum = softmax_step(
            products, is_seen, row_max, row_sum, score_scale, cap, MASKED
        )
        values = load_rows(value_ptr, rows, is_stored, query.dtype, HEAD_DIM, BLOCK_D, MASKED)
        attended = tl.dot(
            weights.to(query.dtype), values, attended * correction[:, None],
            input_precision=PRECISION,
        )  # fmt: skip
    return attended, row_max, row_sum, blocks


@triton.jit(
    do_not_specialize=["table_stride", "num_sequences"],
    # These may be slices of a step's tensors, with any alignment.
    do_not_specialize_on_alignment=["table_ptr", "starts_ptr", "context_ptr"],
)
def paged_prefill_kernel(
    out_ptr, query_ptr, key_ptr, value_ptr, table_ptr, starts_ptr, context_ptr, sinks_ptr,
    score_scale, cap, value_scale, window, table_stride, num_sequences,
    out_token_stride, out_head_stride, query_token_stride, query_head_stride,
    block_stride, token_stride, kv_head_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend a block of query tokens; grid (T // BLOCK_Q + N, kv_heads * tiles per group)."""
    TILES_PER_GROUP: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    # A sequence's last tokens see the most keys, so they go first: the launch ends with short work.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    sequence = find_sequence(starts_ptr, num_sequences, block, BLOCK_Q)
    start = tl.load(starts_ptr + sequence).to(tl.int32)
    query_len = tl.load(starts_ptr + sequence + 1).to(tl.int32) - start
    context_len = tl.load(context_ptr + sequence).to(tl.int32)
    first_token = (block - start // BLOCK_Q - sequence) * BLOCK_Q
    if first_token >= query_len:
        return

    kv_head = tl.program_id(1) // TILES_PER_GROUP
    index = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    token = first_token + index // HEADS
    member = tl.program_id(1) % TILES_PER_GROUP * HEADS + index % HEADS
    head = kv_head * GROUP + member
    is_row = (index < BLOCK_Q * HEADS) & (token < query_len) & (member < GROUP)
    is_stored = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    row = (start + token).to(tl.int64)
    query_rows = tl.multiple_of(row * query_token_stride + head * query_head_stride, 16)
    query = tl.load(query_ptr + query_rows[:, None] + dims[None, :], mask=is_stored, other=0.0)
    if sinks_ptr is None:
        row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        row_sum = tl.zeros((BLOCK_M,), tl.float32)
    else:
        sink = tl.load(sinks_ptr + head, mask=member < GROUP, other=0.0).to(tl.float32)
        row_max = sink * 1.4426950408889634
        row_sum = tl.full((BLOCK_M,), 1.0, tl.float32)
    attended = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)

    first_position = context_len - query_len + first_token
    position = context_len - query_len + token
    end_key = tl.minimum(first_position + BLOCK_Q, context_len)
    # Tiles that all rows see in full need no mask. With a window, any tile may need one.
    if window is None:
        first_key = 0
        first_masked = tl.maximum(first_position + 1, 0) // BLOCK_N
    else:
        first_key = tl.maximum(first_position - window + 1, 0)
        first_masked = first_key // BLOCK_N
    key_head_ptr = key_ptr + kv_head * kv_head_stride
    value_head_ptr = value_ptr + kv_head * kv_head_stride
    table_row_ptr = table_ptr + sequence.to(tl.int64) * table_stride
    if window is None:
        blocks = block_ids(table_row_ptr, 0, context_len, BLOCK_SIZE, BLOCK_N)
        attended, row_max, row_sum, blocks = attend_tiles(
            attended, row_max, row_sum, blocks, query, key_head_ptr, value_head_ptr, table_row_ptr,
            position, context_len, first_key, 0, first_masked, score_scale, cap, window,
            block_stride, token_stride,
            HEAD_DIM, BLOCK_SIZE, BLOCK_D, BLOCK_N, PRECISION, False,
        )  # fmt: skip
    else:
        blocks = block_ids(table_row_ptr, first_masked, context_len, BLOCK_SIZE, BLOCK_N)
    attended, row_max, row_sum, _ = attend_tiles(
        attended, row_max, row_sum, blocks, query, key_head_ptr, value_head_ptr, table_row_ptr,
        position, context_len, first_key, first_masked, tl.cdiv(end_key, BLOCK_N), score_scale, cap,
        window, block_stride, token_stride,
        HEAD_DIM, BLOCK_SIZE, BLOCK_D, BLOCK_N, PRECISION, True,
    )  # fmt: skip

    attended = attended * (value_scale / tl.where(row_sum > 0, row_sum, 1.0))[:, None]
    out_rows = tl.multiple_of(row * out_token_stride + head * out_head_stride, 16)
    tl.store(
        out_ptr + out_rows[:, None] + dims[None, :],
        attended.to(out_ptr.dtype.element_ty),
        mask=is_stored,
    )


def paged_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """Return the causal attention of new tokens over their sequence's K and V so far.

    query: [T, heads, head_dim]. query_starts: [N + 1] int32, the first row of each sequence in
    `query`, then the number of rows that belong to sequences; the rows of `out` after those are
    left unchanged. The other arguments and errors are those of `kernels.paged_decode.paged_decode`.
    A sequence may have no tokens. If `out` is given, nothing is allocated. Returns `out`,
    [T, heads, head_dim].
    """
    check_paged_arguments(query, key_cache, value_cache, block_tables, context_lens, sinks, out)
    check_integers("query_starts", query_starts)
    score_scale, cap = score_factors(scale * key_scale, softcap)
    num_heads, head_dim = query.shape[1:]
    group = num_heads // key_cache.shape[2]
    tile = attention_configuration("prefill", head_dim, group, query.dtype, key_cache.dtype)
    num_sequences = context_lens.shape[0]
    if out is None:
        out = torch.empty_like(query)
    plan = _plan(query, key_cache, out, num_sequences, tile)
    paged_prefill_kernel[plan.grid](
        out, query, key_cache, value_cache, block_tables, query_starts, context_lens, sinks,
        score_scale, cap, float(value_scale), window, block_tables.stride(0), num_sequences,
        *plan.numbers, **plan.options,
    )  # fmt: skip
    return out


@planned
def _plan(
    query: Tensor, cache: Tensor, out: Tensor, num_sequences: int, tile: AttentionConfiguration
) -> Plan:
    num_tokens, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = cache.shape
    group = num_heads // num_kv_heads
    heads_per_tile = min(group, tile.block_m)
    block_q = tile.block_m // heads_per_tile
    num_blocks = num_tokens // block_q + num_sequences
    return Plan(
        (num_blocks, num_kv_heads * -(-group // heads_per_tile)),
        (
            *(stride(rows, dim) for rows in (out, query) for dim in range(2)),
            *(stride(cache, dim) for dim in range(3)),
        ),
        {
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": block_size,
            "BLOCK_D": triton.next_power_of_2(head_dim),
            "BLOCK_M": tile.block_m,
            "BLOCK_Q": block_q,
            "HEADS": heads_per_tile,
            "BLOCK_N": tile.block_n,
            "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
            "maxnreg": tile.max_registers,
        },
    )
