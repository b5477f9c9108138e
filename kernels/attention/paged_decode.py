"""Paged attention of one query per sequence, split over the keys (flash decoding).

A program computes the attention of the query heads of one KV head over one item of a work list: all
of a sequence's keys, or one split of them. The heads are the rows of one tile, so K and V are read
once for all heads. A second kernel combines the results of splits. The launches depend only on
shapes, and kernels read the lengths on the device. So a CUDA graph can capture the launches and
replay them with new lengths.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import check_paged_arguments, score_factors, separate_values, stride
from kernels.attention import work_list
from kernels.attention.attention_tile import (
    attend_tile,
    block_ids,
    load_query,
    rows_and_next_blocks,
    unknown_zero,
)
from kernels.attention.split_results import combine_splits, split_results
from kernels.attention.work_list import WorkList, make_work_list
from kernels.configurations import AttentionConfiguration, attention_configuration
from kernels.fp8 import decode_factor
from kernels.launch_plan import LaunchPlan, planned


@triton.jit
def tile_heads(row_index, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the head of each row of a tile, and whether the row has a head."""
    TILES_PER_GROUP: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    member = tl.program_id(0) % TILES_PER_GROUP * BLOCK_M + row_index
    return tl.program_id(0) // TILES_PER_GROUP * GROUP + member, member < GROUP


# A table may be a slice of a step's tables, with any alignment.
@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["table_ptr"])
def paged_decode_kernel(
    out_ptr, partial_ptr, log_sum_ptr, query_ptr, key_ptr, value_ptr, table_ptr, items_ptr,
    sinks_ptr, score_scale, cap, value_scale, table_stride,
    out_token_stride, out_head_stride, query_token_stride, query_head_stride,
    block_stride, token_stride, kv_head_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, TAIL_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):
    """Attend over an item's keys; grid (kv_heads * tiles per group, items).

    If a sequence has one item, its result is final. Other results go to the combining kernel, which
    also adds their sinks. HEAD_DIM: dims of V, and of K before its tail. TAIL_DIM and a value_ptr
    that is None: see `attend_tile`.
    """
    TILES_PER_GROUP: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    kv_head = tl.program_id(0) // TILES_PER_GROUP
    item_ptr = items_ptr + tl.program_id(1) * 4
    row = tl.load(item_ptr).to(tl.int64)
    first_key = tl.load(item_ptr + 1)
    end_key = tl.load(item_ptr + 2)
    is_whole = tl.load(item_ptr + 3) == 1
    if row < 0:
        return

    dims = tl.arange(0, BLOCK_D)
    head, is_head = tile_heads(tl.arange(0, BLOCK_M), GROUP, BLOCK_M)
    query_rows = query_ptr + row * query_token_stride + head * query_head_stride
    query, row_scale = load_query(query_rows, is_head, key_ptr, HEAD_DIM, BLOCK_D)
    tail, tail_scale = query, row_scale
    if TAIL_DIM > 0:
        tail, tail_scale = load_query(
            query_rows + HEAD_DIM, is_head, key_ptr, TAIL_DIM, TAIL_DIM
        )
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head, mask=is_head, other=0).to(tl.float32)
        row_max = tl.where(is_whole, sink * 1.4426950408889634, row_max)
        row_sum += tl.where(is_whole, 1.0, 0.0)
    attended = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)

    key_head_ptr = key_ptr + kv_head * kv_head_stride
    value_head_ptr = None if value_ptr is None else value_ptr + kv_head * kv_head_stride
    table_row_ptr = table_ptr + row * table_stride
    first_tile = first_key // BLOCK_N
    blocks = block_ids(table_row_ptr, first_tile, end_key, BLOCK_SIZE, BLOCK_N)
    for tile in range(first_tile, tl.cdiv(end_key, BLOCK_N)):
        position = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        is_seen = (position >= first_key) & (position < end_key)
        rows, blocks = rows_and_next_blocks(
            blocks, table_row_ptr, tile, end_key, block_stride, token_stride,
            BLOCK_SIZE, BLOCK_N, PRECISION,
        )
        attended, row_max, row_sum = attend_tile(
            attended, row_max, row_sum, query, row_scale, tail, tail_scale, key_head_ptr,
            value_head_ptr, rows, is_seen, is_seen[None, :], score_scale, cap,
            HEAD_DIM, TAIL_DIM, BLOCK_D, PRECISION, True,
        )

    # A padding row has no keys, so its weighted sum of values is zero. Its sum of weights is zero,
    # too, if there are no sinks.
    row_sum = tl.where(row_sum > 0, row_sum, 1.0)
    attended = attended * (value_scale / row_sum)[:, None]
    row_index = tl.arange(0, BLOCK_M) + unknown_zero(item_ptr + 2, end_key)
    head, is_head = tile_heads(row_index, GROUP, BLOCK_M)
    is_stored = is_head[:, None] & (dims < HEAD_DIM)[None, :]
    if is_whole:
        out = out_ptr + row * out_token_stride + head[:, None] * out_head_stride + dims[None, :]
        tl.store(out, attended.to(out_ptr.dtype.element_ty), mask=is_stored)
    else:
        num_heads = tl.num_programs(0) // TILES_PER_GROUP * GROUP
        slots = tl.program_id(1) * num_heads + head
        tl.store(partial_ptr + slots[:, None] * HEAD_DIM + dims[None, :], attended, mask=is_stored)
        tl.store(log_sum_ptr + slots, row_max + tl.log2(row_sum), mask=is_head)


def paged_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    work: WorkList | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    out: Tensor | None = None,
    scratch: Tensor | None = None,
) -> Tensor:
    """Return the attention of each sequence's newest token over all of its K and V.

    query: [N, heads, head_dim] in fp16, bf16 or fp32. Caches: [blocks, block_size, kv_heads,
    head_dim]; all dimensions but the last may be in any order in memory. If rows are latents
    (`kernels.arguments.LATENT_DIMS`), value_cache is a view of the first dims of key_cache, and
    rows are read once for both. They have the query's
    dtype or, unless that is fp32, hold fp8 e4m3, as float8_e4m3fn or as bytes in uint8. The values
    of fp8 caches are multiplied by `key_scale` and `value_scale`. block_tables: [N, B] int32 or
    int64, read only as far as the contexts reach. context_lens: [N] int32, including the newest
    token; 0 for a padding row, whose output is zero. window, softcap, sinks: as in
    `kernels.attention.sdpa.paged_attention`. work: a list made for these contexts and this window;
    None attends over whole contexts. scratch: fp32 numbers, at least as many as
    `kernels.attention.split_results.scratch_numel` says for the number of items in the work list.
    It is not read after the call, and not used if the list has no more items than sequences. If
    `out`, `work` and `scratch` are given, nothing is allocated. Returns `out`, [N, heads,
    head_dim], or the dim of V.

    Raises ValueError for arguments that the kernel does not support. `kernels.attention.sdpa`
    supports more.
    """
    check_paged_arguments(query, key_cache, value_cache, block_tables, context_lens, sinks, out)
    values = separate_values(key_cache, value_cache)
    if work is not None and len(work.rows) != len(query):
        raise ValueError(
            f"the work list has {len(work.rows)} sequences, but the query has {len(query)}"
        )
    factor = decode_factor(key_cache.dtype)
    score_scale, cap = score_factors(scale * key_scale * factor, softcap)
    tile = _tile(query, key_cache)
    if out is None:
        out = query.new_empty(*query.shape[:2], value_cache.shape[3])
    if work is None:
        work = make_work_list(context_lens, 0, window=window)
    is_split = len(work.items) > len(query)
    results = split_results(scratch, out, len(work.items) if is_split else 0)
    plan = _plan(query, key_cache, out, len(work.items), tile)
    paged_decode_kernel[plan.grid](
        out, *results, query, key_cache, values, block_tables, work.items, sinks,
        score_scale, cap, float(value_scale * factor), block_tables.stride(0),
        *plan.scalars, **plan.options,
    )
    if is_split:
        combine_splits(results, work.rows, 1, sinks, out)
    return out


def wanted_splits(
    query: Tensor,
    key_cache: Tensor,
    num_processors: int,
    max_context_len: int,
    window: int | None = None,
) -> int:
    """Return `kernels.attention.work_list.wanted_splits` for a batch of these shapes on the
    current GPU.

    num_processors: streaming multiprocessors. max_context_len: the longest context to expect.
    """
    num_programs = _programs_at_once(query, key_cache, num_processors)
    longest = max_context_len if window is None else min(window, max_context_len)
    return work_list.wanted_splits(len(query), num_programs, longest)


def max_slots(query: Tensor, key_cache: Tensor, num_processors: int, max_context_len: int) -> int:
    """Return the most items of a work list of up to len(query) sequences."""
    num_programs = _programs_at_once(query, key_cache, num_processors)
    return work_list.max_items(len(query), num_programs, max_context_len)


def _programs_at_once(query: Tensor, cache: Tensor, num_processors: int) -> int:
    """Return how many sequences or splits the GPU attends over at once."""
    tile = _tile(query, cache)
    programs = num_processors * tile.programs_per_processor
    return max(1, programs // (cache.shape[2] * _tiles_per_group(query, cache, tile)))


def _tile(query: Tensor, cache: Tensor) -> AttentionConfiguration:
    group = query.shape[1] // cache.shape[2]
    return attention_configuration("decode", query.shape[2], group, query.dtype, cache.dtype)


@planned
def _plan(
    query: Tensor, cache: Tensor, out: Tensor, num_programs: int, tile: AttentionConfiguration
) -> LaunchPlan:
    _, num_heads, head_dim = out.shape
    _, block_size, num_kv_heads, key_dim = cache.shape
    return LaunchPlan(
        (num_kv_heads * _tiles_per_group(query, cache, tile), num_programs),
        (
            *(stride(rows, dim) for rows in (out, query) for dim in range(2)),
            *(stride(cache, dim) for dim in range(3)),
        ),
        {
            "GROUP": num_heads // num_kv_heads,
            "HEAD_DIM": head_dim,
            "TAIL_DIM": key_dim - head_dim,
            "BLOCK_SIZE": block_size,
            "BLOCK_D": triton.next_power_of_2(head_dim),
            "BLOCK_M": _block_m(num_heads // num_kv_heads, tile),
            "BLOCK_N": tile.block_n,
            "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
            "maxnreg": tile.max_registers,
        },
    )


def _block_m(group: int, tile: AttentionConfiguration) -> int:
    """Return the rows of a tile; tl.dot needs 16."""
    return min(max(16, 1 << (group - 1).bit_length()), tile.block_m)


def _tiles_per_group(query: Tensor, cache: Tensor, tile: AttentionConfiguration) -> int:
    group = query.shape[1] // cache.shape[2]
    return -(-group // _block_m(group, tile))
