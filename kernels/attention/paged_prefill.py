"""Paged attention for sequences with any numbers of new tokens.

A program attends a block of one sequence's query tokens over all keys that they may see
(FlashAttention-2, arXiv 2307.08691), or over one split of them. Its tile has one row per token and
query head, for heads that share a KV head. The work list, which is made on the device, names each
program's block and keys (`kernels.attention.prefill_work`), so launches depend only on the numbers
of tokens and sequences. Whole prompts, chunks after cached prefixes and decodes may be mixed. A
second kernel combines the results of splits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import (
    check_integers,
    check_paged_arguments,
    score_factors,
    separate_values,
    stride,
)
from kernels.attention.attention_tile import (
    attend_tile,
    block_ids,
    load_query,
    rows_and_next_blocks,
    unknown_zero,
)
from kernels.attention.prefill_splits import prefill_tile, prefill_work, tiling
from kernels.attention.prefill_work import PrefillWork
from kernels.attention.segments import average, combine_segments, merge_segment, merge_sink
from kernels.attention.split_results import combine_splits, split_results
from kernels.configurations import AttentionConfiguration
from kernels.fp8 import decode_factor
from kernels.launch_plan import LaunchPlan, planned


@triton.jit
def item_and_tile(num_splits, num_tiles):
    """Return the item and the head tile of this program. Each item has `num_tiles` head tiles.

    Splits start first because they take longest, and none should run alone at the end of the
    launch. Then come all whole blocks of the first head tile, all whole blocks of the second, and
    so on: blocks of one sequence that run at the same time read the same keys.
    """
    program = tl.program_id(0)
    whole = program - num_splits * num_tiles
    num_blocks = tl.num_programs(0) // num_tiles - num_splits
    item = tl.where(whole < 0, program // num_tiles, num_splits + whole % num_blocks)
    return item, tl.where(whole < 0, program % num_tiles, whole // num_blocks)


@triton.jit
def tile_rows(
    row_index, tile, first_token, query_len,
    GROUP: tl.constexpr, BLOCK_Q: tl.constexpr, HEADS: tl.constexpr,
):
    """Return each row's token in the sequence and its head, and whether the row is in use."""
    TILES_PER_GROUP: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    token = first_token + row_index // HEADS
    member = tile % TILES_PER_GROUP * HEADS + row_index % HEADS
    head = tile // TILES_PER_GROUP * GROUP + member
    is_row = (row_index < BLOCK_Q * HEADS) & (token < query_len) & (member < GROUP)
    return token, head, is_row


@triton.jit
def attend_tiles(
    attended, row_max, row_sum, blocks, query, row_scale, tail, tail_scale, key_ptr, value_ptr,
    table_ptr, position, context_len, first_key, begin, end, score_scale, cap, window,
    block_stride, token_stride,
    HEAD_DIM: tl.constexpr, TAIL_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):
    """Return the running sums after key tiles [begin, end), and the block ids of tile `end`.

    blocks: the ids of tile `begin`. Ids are loaded one iteration ahead (`rows_and_next_blocks`) and
    carried in 32 bits, even those of an int64 table. In 64 bits, heads of 64 would need more than
    128 registers. MASKED: some row may not see all keys of a tile.
    """
    for tile in range(begin, end):
        key_position = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        is_stored = key_position < context_len
        is_seen = key_position[None, :] <= position[:, None]
        if window is not None:
            is_stored = is_stored & (key_position >= first_key)
            is_seen = is_seen & (key_position[None, :] > position[:, None] - window)
        rows, blocks = rows_and_next_blocks(
            blocks, table_ptr, tile, context_len, block_stride, token_stride,
            BLOCK_SIZE, BLOCK_N, PRECISION,
        )
        attended, row_max, row_sum = attend_tile(
            attended, row_max, row_sum, query, row_scale, tail, tail_scale, key_ptr, value_ptr,
            rows, is_stored, is_seen, score_scale, cap,
            HEAD_DIM, TAIL_DIM, BLOCK_D, PRECISION, MASKED,
        )
    return attended, row_max, row_sum, blocks


@triton.jit(
    do_not_specialize=["table_stride", "num_splits", "num_tiles"],
    # These may be slices of a step's tensors, with any alignment.
    do_not_specialize_on_alignment=["table_ptr", "starts_ptr", "context_ptr"],
)
def paged_prefill_kernel(
    out_ptr, partial_ptr, log_sum_ptr, query_ptr, key_ptr, value_ptr, table_ptr, starts_ptr,
    context_ptr, items_ptr, sinks_ptr, score_scale, cap, value_scale, window, table_stride,
    num_splits, num_tiles,
    out_token_stride, out_head_stride, query_token_stride, query_head_stride,
    block_stride, token_stride, kv_head_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, TAIL_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, SEGMENT_TILES: tl.constexpr,
):
    """Attend a block of query tokens over an item's keys; grid (items * num_tiles,).

    num_tiles: kv_heads * tiles per group. The first `num_splits` items are splits: their results go
    to the combining kernel, which adds the sinks. The result of a whole block is final.
    HEAD_DIM, TAIL_DIM and value_ptr are as in `kernels.attention.paged_decode`. SEGMENT_TILES: key
    tiles in a segment; None: keys are not in segments.
    """
    TILES_PER_GROUP: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    item, head_tile = item_and_tile(num_splits, num_tiles)
    item_ptr = items_ptr + item * 4
    sequence = tl.load(item_ptr)
    first_token = tl.load(item_ptr + 1)
    begin = tl.load(item_ptr + 2)
    end = tl.load(item_ptr + 3)
    if sequence < 0:
        return

    is_whole = item >= num_splits
    start = tl.load(starts_ptr + sequence).to(tl.int32)
    query_len = tl.load(starts_ptr + sequence + 1).to(tl.int32) - start
    context_len = tl.load(context_ptr + sequence).to(tl.int32)
    first_position = context_len - query_len + first_token
    first_key = 0 if window is None else tl.maximum(first_position - window + 1, 0)
    # Tiles that all rows see in full need no mask, so they have a loop of their own. In three cases
    # there is only one loop, with masks. With a window, any tile may need a mask. With large heads,
    # or such that have to be converted, two loops would spill registers. With segments, a tile must
    # have the same bits, whichever row of the block comes first.
    IS_CONVERTED: tl.constexpr = key_ptr.dtype.element_ty != query_ptr.dtype.element_ty
    MAX_DIM: tl.constexpr = 128 if IS_CONVERTED else 256
    TWO_LOOPS: tl.constexpr = window is None and SEGMENT_TILES is None and HEAD_DIM <= MAX_DIM
    first_masked = begin
    if TWO_LOOPS:
        first_unseen = tl.maximum(first_position + 1, 0) // BLOCK_N
        first_masked = tl.maximum(begin, tl.minimum(first_unseen, end))
    row_index = tl.arange(0, BLOCK_M)
    token, head, is_row = tile_rows(
        row_index, head_tile, first_token, query_len, GROUP, BLOCK_Q, HEADS
    )

    row = (start + token).to(tl.int64)
    query_rows = query_ptr + tl.multiple_of(
        row * query_token_stride + head * query_head_stride, 16
    )
    query, row_scale = load_query(query_rows, is_row, key_ptr, HEAD_DIM, BLOCK_D)
    tail, tail_scale = query, row_scale
    if TAIL_DIM > 0:
        tail, tail_scale = load_query(
            query_rows + HEAD_DIM, is_row, key_ptr, TAIL_DIM, TAIL_DIM
        )
    if sinks_ptr is None or SEGMENT_TILES is not None:
        row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        row_sum = tl.zeros((BLOCK_M,), tl.float32)
    else:
        sink = tl.load(sinks_ptr + head, mask=is_row, other=0.0).to(tl.float32)
        row_max = tl.where(is_whole, sink * 1.4426950408889634, float("-inf"))
        row_sum = tl.zeros((BLOCK_M,), tl.float32) + tl.where(is_whole, 1.0, 0.0)
    attended = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)

    position = context_len - query_len + token
    kv_head = head_tile // TILES_PER_GROUP
    key_head_ptr = key_ptr + kv_head * kv_head_stride
    value_head_ptr = None if value_ptr is None else value_ptr + kv_head * kv_head_stride
    table_row_ptr = table_ptr + sequence.to(tl.int64) * table_stride
    blocks = block_ids(table_row_ptr, begin, context_len, BLOCK_SIZE, BLOCK_N).to(tl.int32)
    if TWO_LOOPS:
        attended, row_max, row_sum, blocks = attend_tiles(
            attended, row_max, row_sum, blocks, query, row_scale, tail, tail_scale, key_head_ptr,
            value_head_ptr, table_row_ptr, position, context_len, first_key, begin, first_masked,
            score_scale, cap, window, block_stride, token_stride,
            HEAD_DIM, TAIL_DIM, BLOCK_SIZE, BLOCK_D, BLOCK_N, PRECISION, False,
        )
    if SEGMENT_TILES is None:
        attended, row_max, row_sum, _ = attend_tiles(
            attended, row_max, row_sum, blocks, query, row_scale, tail, tail_scale, key_head_ptr,
            value_head_ptr, table_row_ptr, position, context_len, first_key, first_masked, end,
            score_scale, cap, window, block_stride, token_stride,
            HEAD_DIM, TAIL_DIM, BLOCK_SIZE, BLOCK_D, BLOCK_N, PRECISION, True,
        )
    else:
        zero, nothing, no_score = attended, row_sum, row_max
        for segment in range(begin // SEGMENT_TILES, tl.cdiv(end, SEGMENT_TILES)):
            first = tl.maximum(begin, segment * SEGMENT_TILES)
            last = tl.minimum(end, (segment + 1) * SEGMENT_TILES)
            values, segment_max, segment_sum, blocks = attend_tiles(
                zero, no_score, nothing, blocks, query, row_scale, tail, tail_scale, key_head_ptr,
                value_head_ptr, table_row_ptr, position, context_len, first_key, first, last,
                score_scale, cap, window, block_stride, token_stride,
                HEAD_DIM, TAIL_DIM, BLOCK_SIZE, BLOCK_D, BLOCK_N, PRECISION, True,
            )
            values, segment_sum = average(values, segment_sum, value_scale)
            row_max, row_sum, attended = merge_segment(
                row_max, row_sum, attended, segment_max + tl.log2(segment_sum), values
            )
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + head, mask=is_row, other=0.0).to(tl.float32)
            sink = tl.where(is_whole, sink, float("-inf"))
            row_max, row_sum, attended = merge_sink(row_max, row_sum, attended, sink)
        value_scale = 1.0

    attended, row_sum = average(attended, row_sum, value_scale)
    row_index = tl.arange(0, BLOCK_M) + unknown_zero(item_ptr + 3, end)
    token, head, is_row = tile_rows(
        row_index, head_tile, first_token, query_len, GROUP, BLOCK_Q, HEADS
    )
    dims = tl.arange(0, BLOCK_D)
    is_stored = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    if is_whole:
        row = (start + token).to(tl.int64)
        out_rows = tl.multiple_of(row * out_token_stride + head * out_head_stride, 16)
        tl.store(
            out_ptr + out_rows[:, None] + dims[None, :],
            attended.to(out_ptr.dtype.element_ty),
            mask=is_stored,
        )
    else:  # the scratch has less than 2^31 numbers
        num_heads = num_tiles // TILES_PER_GROUP * GROUP
        slots = (item * BLOCK_Q + token - first_token) * num_heads + head
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
    work: PrefillWork | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    out: Tensor | None = None,
    scratch: Tensor | None = None,
) -> Tensor:
    """Return the causal attention of new tokens over their sequence's K and V so far.

    query: [T, heads, head_dim]. query_starts: [N + 1] int32, the first row of each sequence in
    `query`, then the number of rows that belong to sequences; the rows of `out` after those are
    left unchanged. work: the list that `prefill_work` or `segment_work` made from the same
    arguments; None makes one without splits. scratch: fp32 numbers, at least as many as
    `kernels.attention.split_results.scratch_numel` says for the list's `num_slots`. It is not read
    after the call, and not used without splits. The other arguments and errors are those of
    `kernels.attention.paged_decode.paged_decode`. A sequence may have no tokens. If `out`, `work`
    and `scratch` are given, nothing is allocated. Returns `out`, [T, heads, head_dim], or the dim
    of V.
    """
    check_paged_arguments(
        query, key_cache, value_cache, block_tables, context_lens, sinks, out, True
    )
    check_integers("query_starts", query_starts)
    values = separate_values(key_cache, value_cache)
    factor = decode_factor(key_cache.dtype)
    score_scale, cap = score_factors(scale * key_scale * factor, softcap)
    if out is None:
        out = query.new_empty(*query.shape[:2], value_cache.shape[3])
    if work is None:
        work = prefill_work(query, key_cache, query_starts, context_lens, 0, window=window)
    results = split_results(scratch, out, work.num_slots)
    tile = prefill_tile(query, key_cache, work.segment_keys)
    sizes = (context_lens.shape[0], len(work.items), work.num_splits)
    plan = _plan(query, key_cache, out, *sizes, tile, work.segment_keys)
    paged_prefill_kernel[plan.grid](
        out, *results, query, key_cache, values, block_tables, query_starts, context_lens,
        work.items, sinks, score_scale, cap, float(value_scale * factor), window,
        block_tables.stride(0), *plan.scalars, **plan.options,
    )
    if work.num_splits:
        combine = combine_splits if work.segment_keys is None else combine_segments
        combine(results, work.rows, work.block_q, sinks, out)
    return out


@planned
def _plan(
    query: Tensor, cache: Tensor, out: Tensor,
    num_sequences: int, num_items: int, num_splits: int, tile: AttentionConfiguration,
    segment_keys: int | None,
) -> LaunchPlan:
    """Raise ValueError if the list of `num_items` was not made for so many tokens and sequences."""
    num_tokens, num_heads, head_dim = out.shape
    _, block_size, num_kv_heads, key_dim = cache.shape
    group = num_heads // num_kv_heads
    block_q, num_tiles = tiling(query, cache, tile)
    num_blocks = num_tokens // block_q + num_sequences
    if num_items - num_splits != num_blocks:
        raise ValueError(
            f"the work list has {num_items - num_splits} blocks of tokens, but this batch has "
            f"{num_blocks}"
        )
    return LaunchPlan(
        (num_items * num_tiles,),
        (
            num_splits,
            num_tiles,
            *(stride(rows, dim) for rows in (out, query) for dim in range(2)),
            *(stride(cache, dim) for dim in range(3)),
        ),
        {
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "TAIL_DIM": key_dim - head_dim,
            "BLOCK_SIZE": block_size,
            "BLOCK_D": triton.next_power_of_2(head_dim),
            "BLOCK_M": tile.block_m,
            "BLOCK_Q": block_q,
            "HEADS": min(group, tile.block_m),
            "BLOCK_N": tile.block_n,
            "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
            "SEGMENT_TILES": None if segment_keys is None else segment_keys // tile.block_n,
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
            "maxnreg": tile.max_registers,
        },
    )
