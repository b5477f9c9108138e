"""Paged attention for sequences with any numbers of new tokens.

A program computes a block of one sequence's query tokens over all keys that they may see
(FlashAttention-2, arXiv 2307.08691). Its tile has one row per token and query head, for heads that
share a KV head. Programs find their sequence on the device, so the grid depends only on the numbers
of tokens and sequences. Whole prompts, chunks after cached prefixes and decodes may be mixed.

A few tokens after a long prefix are too few programs to fill a GPU. Then the keys are split as in
decode, and a second kernel combines the results.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_tile import (
    block_ids,
    load_rows,
    row_offsets,
    softmax_step,
    to_fp16,
    unknown_zero,
)
from kernels.cache_descriptors import CacheDescriptors, check_descriptors, load_block
from kernels.configurations import AttentionConfiguration, attention_configuration
from kernels.fp8 import decode_factor
from kernels.paged_arguments import check_integers, check_paged_arguments, score_factors, stride
from kernels.plan import Plan, planned
from kernels.split_results import combine_equal, split_results
from kernels.work_list import WAVES

MIN_SPLIT_KEYS = 512
"""Fewest keys in a split: reading them takes about as long as launching the combining kernel."""
MAX_SPLITS = 64


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
def tile_rows(
    row_index, first_token, query_len,
    GROUP: tl.constexpr, BLOCK_Q: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Return the token in the sequence and the head of each row of a tile, and if it has one."""
    TILES_PER_GROUP: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    token = first_token + row_index // HEADS
    member = tl.program_id(1) % TILES_PER_GROUP * HEADS + row_index % HEADS
    head = tl.program_id(1) // TILES_PER_GROUP * GROUP + member
    is_row = (row_index < BLOCK_Q * HEADS) & (token < query_len) & (member < GROUP)
    return token, head, is_row


@triton.jit
def result_slots(row, head, split, num_splits, GROUP: tl.constexpr, HEADS: tl.constexpr):
    """Return where the results of rows are in the scratch, which has less than 2^31 numbers."""
    num_heads = tl.num_programs(1) // ((GROUP + HEADS - 1) // HEADS) * GROUP
    return (row * num_splits + split) * num_heads + head


@triton.jit
def attend_tiles(
    attended, row_max, row_sum, blocks, query, row_scale, key_ptr, value_ptr, table_ptr, position,
    context_len, first_key, begin, end, score_scale, cap, window, block_stride, token_stride,
    key_descriptor, value_descriptor, kv_head,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return the running sums after key tiles [begin, end), and the block ids of tile `end`.

    blocks: the ids of tile `begin`. The ids of a tile are loaded one iteration ahead: if K and V
    addresses depended on a load of the same iteration, Triton's pipeliner would give K and V fewer
    buffers than num_stages. MASKED: some row may not see all keys of a tile. Unless the descriptors
    are None, a tile is a block and is loaded through them.
    """
    for tile in range(begin, end):
        key_position = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        is_stored = key_position < context_len
        is_seen = key_position[None, :] <= position[:, None]
        if window is not None:
            is_stored = is_stored & (key_position >= first_key)
            is_seen = is_seen & (key_position[None, :] > position[:, None] - window)
        if key_descriptor is None:
            rows = row_offsets(
                blocks, tile, block_stride, token_stride, BLOCK_SIZE, BLOCK_N, PRECISION
            )
        else:
            block = tl.sum(blocks, 0).to(tl.int32)
        blocks = block_ids(table_ptr, tile + 1, context_len, BLOCK_SIZE, BLOCK_N)
        if key_descriptor is None:
            keys = load_rows(key_ptr, rows, is_stored, query.dtype, HEAD_DIM, BLOCK_D, MASKED)
        else:
            keys = load_block(key_descriptor, block, kv_head, BLOCK_N, BLOCK_D)
        products = tl.dot(query, keys.T, input_precision=PRECISION)
        if row_scale is not None:
            products *= row_scale[:, None]
        weights, correction, row_max, row_sum = softmax_step(
            products, is_seen, row_max, row_sum, score_scale, cap, MASKED
        )
        if value_descriptor is None:
            values = load_rows(value_ptr, rows, is_stored, query.dtype, HEAD_DIM, BLOCK_D, MASKED)
        else:
            values = load_block(value_descriptor, block, kv_head, BLOCK_N, BLOCK_D)
        attended = tl.dot(
            weights.to(query.dtype), values, attended * correction[:, None],
            input_precision=PRECISION,
        )  # fmt: skip
    return attended, row_max, row_sum, blocks


@triton.jit(
    do_not_specialize=["table_stride", "num_sequences", "num_splits", "min_tiles"],
    # These may be slices of a step's tensors, with any alignment.
    do_not_specialize_on_alignment=["table_ptr", "starts_ptr", "context_ptr"],
)
def paged_prefill_kernel(
    out_ptr, partial_ptr, log_sum_ptr, query_ptr, key_ptr, value_ptr, table_ptr, starts_ptr,
    context_ptr, sinks_ptr, score_scale, cap, value_scale, window, table_stride, num_sequences,
    num_splits, min_tiles,
    key_descriptor, value_descriptor,
    out_token_stride, out_head_stride, query_token_stride, query_head_stride,
    block_stride, token_stride, kv_head_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend a block of query tokens; grid (T // BLOCK_Q + N, kv_heads * tiles per group).

    Unless `num_splits` is None, attend over one split of the keys that the block may see; the grid
    has a third dimension, `num_splits`. Splits without keys write that they have none.
    """
    # A sequence's last tokens see the most keys, so they go first: the launch ends with short work.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    sequence = find_sequence(starts_ptr, num_sequences, block, BLOCK_Q)
    start = tl.load(starts_ptr + sequence).to(tl.int32)
    query_len = tl.load(starts_ptr + sequence + 1).to(tl.int32) - start
    context_len = tl.load(context_ptr + sequence).to(tl.int32)
    first_token = (block - start // BLOCK_Q - sequence) * BLOCK_Q
    if first_token >= query_len:
        return

    first_position = context_len - query_len + first_token
    end_key = tl.minimum(first_position + BLOCK_Q, context_len)
    first_key = 0 if window is None else tl.maximum(first_position - window + 1, 0)
    begin = first_key // BLOCK_N
    end = tl.cdiv(end_key, BLOCK_N)
    # Tiles that all rows see in full need no mask. With a window, any tile may need one. A loop for
    # each kind would spill registers if heads are large and their tiles have to be converted.
    IS_CONVERTED: tl.constexpr = key_ptr.dtype.element_ty != query_ptr.dtype.element_ty
    TWO_LOOPS: tl.constexpr = window is None and not (IS_CONVERTED and HEAD_DIM > 128)
    first_masked = tl.maximum(first_position + 1, 0) // BLOCK_N if TWO_LOOPS else begin
    row_index = tl.arange(0, BLOCK_M)
    token, head, is_row = tile_rows(row_index, first_token, query_len, GROUP, BLOCK_Q, HEADS)
    if num_splits is not None:
        split = tl.program_id(2)
        num_tiles = tl.maximum(tl.cdiv(end - begin, num_splits), min_tiles)
        begin += split * num_tiles
        end = tl.minimum(begin + num_tiles, end)
        first_masked = tl.maximum(begin, tl.minimum(first_masked, end))
        if begin >= end:
            slots = result_slots(start + token, head, split, num_splits, GROUP, HEADS)
            tl.store(log_sum_ptr + slots, float("-inf"), mask=is_row)
            return

    dims = tl.arange(0, BLOCK_D)
    is_stored = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    row = (start + token).to(tl.int64)
    query_rows = tl.multiple_of(row * query_token_stride + head * query_head_stride, 16)
    query = tl.load(query_ptr + query_rows[:, None] + dims[None, :], mask=is_stored, other=0.0)
    row_scale = None
    if IS_CONVERTED and query.dtype == tl.bfloat16:
        query, row_scale = to_fp16(query)
    if sinks_ptr is None:
        row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        row_sum = tl.zeros((BLOCK_M,), tl.float32)
    else:
        sink = tl.load(sinks_ptr + head, mask=is_row, other=0.0).to(tl.float32)
        row_max = sink * 1.4426950408889634
        row_sum = tl.full((BLOCK_M,), 1.0, tl.float32)
    attended = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)

    position = context_len - query_len + token
    kv_head = tl.program_id(1) // ((GROUP + HEADS - 1) // HEADS)
    key_head_ptr = key_ptr + kv_head * kv_head_stride
    value_head_ptr = value_ptr + kv_head * kv_head_stride
    table_row_ptr = table_ptr + sequence.to(tl.int64) * table_stride
    blocks = block_ids(table_row_ptr, begin, context_len, BLOCK_SIZE, BLOCK_N)
    if TWO_LOOPS:
        attended, row_max, row_sum, blocks = attend_tiles(
            attended, row_max, row_sum, blocks, query, row_scale, key_head_ptr, value_head_ptr,
            table_row_ptr, position, context_len, first_key, begin, first_masked, score_scale, cap,
            window, block_stride, token_stride, key_descriptor, value_descriptor, kv_head,
            HEAD_DIM, BLOCK_SIZE, BLOCK_D, BLOCK_N, PRECISION, False,
        )  # fmt: skip
    attended, row_max, row_sum, _ = attend_tiles(
        attended, row_max, row_sum, blocks, query, row_scale, key_head_ptr, value_head_ptr,
        table_row_ptr, position, context_len, first_key, first_masked, end, score_scale, cap,
        window, block_stride, token_stride, None, None, kv_head,
        HEAD_DIM, BLOCK_SIZE, BLOCK_D, BLOCK_N, PRECISION, True,
    )  # fmt: skip

    row_sum = tl.where(row_sum > 0, row_sum, 1.0)
    attended = attended * (value_scale / row_sum)[:, None]
    row_index = tl.arange(0, BLOCK_M) + unknown_zero(starts_ptr + sequence, start)
    token, head, is_row = tile_rows(row_index, first_token, query_len, GROUP, BLOCK_Q, HEADS)
    is_stored = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    if num_splits is None:
        row = (start + token).to(tl.int64)
        out_rows = tl.multiple_of(row * out_token_stride + head * out_head_stride, 16)
        tl.store(
            out_ptr + out_rows[:, None] + dims[None, :],
            attended.to(out_ptr.dtype.element_ty),
            mask=is_stored,
        )
    else:
        slots = result_slots(start + token, head, split, num_splits, GROUP, HEADS)
        tl.store(partial_ptr + slots[:, None] * HEAD_DIM + dims[None, :], attended, mask=is_stored)
        tl.store(log_sum_ptr + slots, row_max + tl.log2(row_sum), mask=is_row)


def paged_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    num_splits: int = 1,
    min_split_keys: int = MIN_SPLIT_KEYS,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    out: Tensor | None = None,
    scratch: Tensor | None = None,
    descriptors: CacheDescriptors | None = None,
) -> Tensor:
    """Return the causal attention of new tokens over their sequence's K and V so far.

    query: [T, heads, head_dim]. query_starts: [N + 1] int32, the first row of each sequence in
    `query`, then the number of rows that belong to sequences; the rows of `out` after those are
    left unchanged. num_splits: into how many parts the keys are split, see `wanted_splits`; where
    parts would be shorter than `min_split_keys`, there are fewer. scratch: fp32, not read after the
    call, at least `kernels.split_results.scratch_numel` of T * num_splits long. descriptors: with
    those of the caches, TMA loads the tiles that all their rows see in full; on sm_90 and later,
    without a window, and if a block is a tile (64 tokens for heads up to 128). The other arguments
    and errors are those of `kernels.paged_decode.paged_decode`. A sequence may have no tokens. If
    `out` and, for several splits, `scratch` are given, nothing is allocated. Returns `out`,
    [T, heads, head_dim].
    """
    if num_splits < 1:
        raise ValueError(f"num_splits is {num_splits}; it must be at least 1")
    check_paged_arguments(query, key_cache, value_cache, block_tables, context_lens, sinks, out)
    check_integers("query_starts", query_starts)
    factor = decode_factor(key_cache.dtype)
    score_scale, cap = score_factors(scale * key_scale * factor, softcap)
    num_sequences = context_lens.shape[0]
    if out is None:
        out = torch.empty_like(query)
    is_split = num_splits > 1
    results = split_results(scratch, query, len(query) * num_splits) if is_split else (None, None)
    tile = _tile(query, key_cache)
    if descriptors is not None:
        check_descriptors(descriptors, key_cache, value_cache, tile.block_n, window)
    plan = _plan(query, key_cache, out, num_sequences, num_splits, tile)
    paged_prefill_kernel[plan.grid](
        out, *results, query, key_cache, value_cache, block_tables, query_starts, context_lens,
        None if is_split else sinks, score_scale, cap, float(value_scale * factor), window,
        block_tables.stride(0), num_sequences,
        num_splits if is_split else None,
        max(1, min_split_keys // tile.block_n) if is_split else None,
        *(descriptors or (None, None)),
        *plan.numbers, **plan.options,
    )  # fmt: skip
    if is_split:
        combine_equal(results, num_splits, query_starts, sinks, out)
    return out


def wanted_splits(
    query: Tensor,
    key_cache: Tensor,
    lengths: Sequence[tuple[int, int]],
    num_processors: int,
    window: int | None = None,
) -> int:
    """Return how often `paged_prefill` should split the keys on the current GPU.

    lengths: new tokens and context length of each of the N sequences, as far as the host knows
    them. num_processors: streaming multiprocessors. With this number, the block that sees the most
    keys takes no longer than a processor's share of all work, unless the grid would then fill the
    GPU more than WAVES times. This also bounds the scratch (`max_slots`).

    NOTE: all blocks are split alike, also those that have no token. So a long prefix beside many
    tokens is not split, although the others then wait for it.
    """
    tile = _tile(query, key_cache)
    block_q, num_tiles = _tiling(query, key_cache, tile)
    num_programs = num_processors * tile.programs_per_processor
    blocks = [-(-new // block_q) for new, _ in lengths]
    keys = [context if window is None else min(context, window + block_q) for _, context in lengths]
    longest = max(keys, default=0)
    if longest < 2 * MIN_SPLIT_KEYS or not any(blocks):
        return 1
    work = num_tiles * sum(map(operator.mul, blocks, keys))
    wanted = longest * num_programs // work
    most = WAVES * num_programs // (num_tiles * (len(query) // block_q + len(lengths)))
    return max(1, min(wanted, most, longest // MIN_SPLIT_KEYS, MAX_SPLITS))


def max_slots(query: Tensor, key_cache: Tensor, num_processors: int, max_context_len: int) -> int:
    """Return the most results per head that a step of up to len(query) tokens splits into."""
    if max_context_len < 2 * MIN_SPLIT_KEYS:
        return 0
    tile = _tile(query, key_cache)
    block_q, num_tiles = _tiling(query, key_cache, tile)
    most = WAVES * num_processors * tile.programs_per_processor // num_tiles * block_q
    return min(most, len(query) * MAX_SPLITS)


def _tile(query: Tensor, cache: Tensor) -> AttentionConfiguration:
    group = query.shape[1] // cache.shape[2]
    return attention_configuration("prefill", query.shape[2], group, query.dtype, cache.dtype)


def _tiling(query: Tensor, cache: Tensor, tile: AttentionConfiguration) -> tuple[int, int]:
    """Return the query tokens in a tile, and the tiles in a block of as many tokens."""
    group = query.shape[1] // cache.shape[2]
    heads_per_tile = min(group, tile.block_m)
    return tile.block_m // heads_per_tile, cache.shape[2] * -(-group // heads_per_tile)


@planned
def _plan(
    query: Tensor,
    cache: Tensor,
    out: Tensor,
    num_sequences: int,
    num_splits: int,
    tile: AttentionConfiguration,
) -> Plan:
    num_tokens, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = cache.shape
    group = num_heads // num_kv_heads
    block_q, num_tiles = _tiling(query, cache, tile)
    grid = (num_tokens // block_q + num_sequences, num_tiles)
    return Plan(
        grid if num_splits == 1 else (*grid, num_splits),
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
            "HEADS": min(group, tile.block_m),
            "BLOCK_N": tile.block_n,
            "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
            "maxnreg": tile.max_registers,
        },
    )
