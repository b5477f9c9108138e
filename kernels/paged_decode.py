"""Paged attention of one query per sequence, split over the keys (flash decoding).

A program computes the query heads of one KV head over one split of a sequence's keys. The heads are
the rows of one tile, so K and V are read once for all of them. With more than one split, a second
kernel combines the partial results. The launches depend only on shapes and `num_splits`; lengths
are read on the device. So both can be captured in a CUDA graph and replayed with new lengths.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_tile import block_ids, load_rows, row_offsets, softmax_step
from kernels.configurations import AttentionConfiguration, attention_configuration
from kernels.paged_arguments import check_paged_arguments, score_factors, stride
from kernels.plan import Plan, planned


@triton.jit
def split_bounds(
    context_len, window, split,
    BLOCK_N: tl.constexpr, NUM_SPLITS: tl.constexpr, MIN_TILES: tl.constexpr,
):  # fmt: skip
    """Return the first visible key, first and past-last tile of `split`, and number of splits with
    work."""
    first_key = 0 if window is None else tl.maximum(context_len - window, 0)
    first_tile = first_key // BLOCK_N
    end_tile = tl.cdiv(context_len, BLOCK_N)
    num_tiles = end_tile - first_tile
    tiles_per_split = tl.maximum(tl.cdiv(num_tiles, NUM_SPLITS), MIN_TILES)
    begin = first_tile + split * tiles_per_split
    end = tl.minimum(begin + tiles_per_split, end_tile)
    return first_key, begin, end, tl.cdiv(num_tiles, tiles_per_split)


@triton.jit(
    do_not_specialize=["table_stride"],
    # Slices of a step's tables begin anywhere.
    do_not_specialize_on_alignment=["table_ptr", "context_ptr"],
)
def paged_decode_kernel(
    out_ptr, partial_ptr, log_sum_ptr, query_ptr, key_ptr, value_ptr, table_ptr, context_ptr,
    sinks_ptr, score_scale, cap, value_scale, window, table_stride,
    out_token_stride, out_head_stride, query_token_stride, query_head_stride,
    block_stride, token_stride, kv_head_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    NUM_SPLITS: tl.constexpr, MIN_TILES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend over one split; grid (kv_heads * tiles per group, N, NUM_SPLITS).

    With several splits, the combining kernel adds the sinks.
    """
    TILES_PER_GROUP: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    kv_head = tl.program_id(0) // TILES_PER_GROUP
    row = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    context_len = tl.load(context_ptr + row).to(tl.int32)
    first_key, begin, end, _ = split_bounds(
        context_len, window, split, BLOCK_N, NUM_SPLITS, MIN_TILES
    )
    if NUM_SPLITS > 1 and begin >= end:
        return

    dims = tl.arange(0, BLOCK_D)
    member = tl.program_id(0) % TILES_PER_GROUP * BLOCK_M + tl.arange(0, BLOCK_M)
    head = kv_head * GROUP + member
    is_head = member < GROUP
    is_stored = is_head[:, None] & (dims < HEAD_DIM)[None, :]
    query = tl.load(
        query_ptr + row * query_token_stride + head[:, None] * query_head_stride + dims[None, :],
        mask=is_stored,
        other=0,
    )
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head, mask=is_head, other=0).to(tl.float32)
        row_max = sink * 1.4426950408889634
        row_sum += 1.0
    attended = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)

    key_head_ptr = key_ptr + kv_head * kv_head_stride
    value_head_ptr = value_ptr + kv_head * kv_head_stride
    table_row_ptr = table_ptr + row * table_stride
    # The ids of a tile are loaded one iteration ahead. If K and V addresses depended on a load of
    # the same iteration, Triton's pipeliner would give K and V fewer buffers than num_stages.
    blocks = block_ids(table_row_ptr, begin, context_len, BLOCK_SIZE, BLOCK_N)
    for tile in range(begin, end):
        position = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        is_seen = (position >= first_key) & (position < context_len)
        rows = row_offsets(blocks, tile, block_stride, token_stride, BLOCK_SIZE, BLOCK_N, PRECISION)
        blocks = block_ids(table_row_ptr, tile + 1, context_len, BLOCK_SIZE, BLOCK_N)
        keys = load_rows(key_head_ptr, rows, is_seen, query.dtype, HEAD_DIM, BLOCK_D, True)
        products = tl.dot(query, keys.T, input_precision=PRECISION)
        weights, correction, row_max, row_sum = softmax_step(
            products, is_seen[None, :], row_max, row_sum, score_scale, cap, True
        )
        values = load_rows(value_head_ptr, rows, is_seen, query.dtype, HEAD_DIM, BLOCK_D, True)
        attended = tl.dot(
            weights.to(query.dtype), values, attended * correction[:, None],
            input_precision=PRECISION,
        )  # fmt: skip

    # A padding row has no key and no sink; its output is zero.
    attended = attended * (value_scale / tl.where(row_sum > 0, row_sum, 1.0))[:, None]
    if NUM_SPLITS == 1:
        out = out_ptr + row * out_token_stride + head[:, None] * out_head_stride + dims[None, :]
        tl.store(out, attended.to(out_ptr.dtype.element_ty), mask=is_stored)
    else:
        num_heads = tl.num_programs(0) // TILES_PER_GROUP * GROUP
        slot = (row * num_heads + head) * NUM_SPLITS + split
        tl.store(partial_ptr + slot[:, None] * HEAD_DIM + dims[None, :], attended, mask=is_stored)
        tl.store(log_sum_ptr + slot, row_max + tl.log2(row_sum), mask=is_head)


@triton.jit(do_not_specialize_on_alignment=["context_ptr"])
def combine_splits_kernel(
    out_ptr, partial_ptr, log_sum_ptr, context_ptr, sinks_ptr, window,
    out_token_stride, out_head_stride,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    NUM_SPLITS: tl.constexpr, MIN_TILES: tl.constexpr,
):  # fmt: skip
    """Combine the splits of one head; grid (heads, N).

    Splits without work wrote nothing, so they are not read.
    """
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    context_len = tl.load(context_ptr + row).to(tl.int32)
    _, _, _, num_live = split_bounds(context_len, window, 0, BLOCK_N, NUM_SPLITS, MIN_TILES)
    split = tl.arange(0, NUM_SPLITS)
    dims = tl.arange(0, BLOCK_D)
    is_live = split < num_live
    first_slot = (row * tl.num_programs(0) + head) * NUM_SPLITS
    log_sums = tl.load(log_sum_ptr + first_slot + split, mask=is_live, other=float("-inf"))
    largest = tl.max(log_sums, 0)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
        largest = tl.maximum(largest, sink)
    anchor = tl.where(largest == float("-inf"), 0.0, largest)
    shares = tl.exp2(log_sums - anchor)
    total = tl.sum(shares, 0)
    if sinks_ptr is not None:
        total += tl.exp2(sink - anchor)
    partials = tl.load(
        partial_ptr + (first_slot + split)[:, None] * HEAD_DIM + dims[None, :],
        mask=is_live[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    )
    combined = tl.sum(partials * shares[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(
        out_ptr + row * out_token_stride + head * out_head_stride + dims,
        combined.to(out_ptr.dtype.element_ty),
        mask=dims < HEAD_DIM,
    )


def paged_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    num_splits: int,
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
    head_dim], all dimensions but the last in any order in memory, of the query's dtype or, unless
    that is fp32, fp8 e4m3 as float8_e4m3fn or as its bytes in uint8. The values of fp8 caches are
    multiplied by `key_scale` and `value_scale`. block_tables: [N, B] int32 or int64, read only as
    far as the contexts reach. context_lens: [N] int32, including the newest token; 0 for a padding
    row, whose output is zero. window, softcap, sinks: as in `kernels.sdpa.paged_attention`.
    num_splits: a power of two, see `kernels.configurations.num_splits`. scratch: fp32, at least
    `scratch_numel` long, not read after the call. If `out` and, for several splits, `scratch` are
    given, nothing is allocated. Returns `out`, [N, heads, head_dim].

    Raises ValueError for arguments that the kernel does not support; `kernels.sdpa` does.
    """
    check_paged_arguments(query, key_cache, value_cache, block_tables, context_lens, sinks, out)
    if num_splits < 1 or num_splits & (num_splits - 1):
        raise ValueError(f"num_splits is {num_splits}; it must be a power of two")
    score_scale, cap = score_factors(scale * key_scale, softcap)
    partials, log_sums = _split_scratch(scratch, query, num_splits)
    _, num_heads, head_dim = query.shape
    group = num_heads // key_cache.shape[2]
    tile = attention_configuration("decode", head_dim, group, query.dtype, key_cache.dtype)
    if out is None:
        out = torch.empty_like(query)
    plan = _plan(query, key_cache, out, num_splits, tile)
    paged_decode_kernel[plan.grid](
        out, partials, log_sums, query, key_cache, value_cache, block_tables, context_lens,
        sinks if num_splits == 1 else None, score_scale, cap, float(value_scale), window,
        block_tables.stride(0), *plan.numbers, **plan.options,
    )  # fmt: skip
    if num_splits > 1:
        plan = _combining_plan(out, num_splits, tile)
        combine_splits_kernel[plan.grid](
            out, partials, log_sums, context_lens, sinks, window, *plan.numbers, **plan.options
        )
    return out


@planned
def _plan(
    query: Tensor, cache: Tensor, out: Tensor, num_splits: int, tile: AttentionConfiguration
) -> Plan:
    num_rows, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = cache.shape
    group = num_heads // num_kv_heads
    block_m = min(max(16, triton.next_power_of_2(group)), tile.block_m)
    return Plan(
        (num_kv_heads * -(-group // block_m), num_rows, num_splits),
        (
            *(stride(rows, dim) for rows in (out, query) for dim in range(2)),
            *(stride(cache, dim) for dim in range(3)),
        ),
        {
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": block_size,
            "BLOCK_D": triton.next_power_of_2(head_dim),
            "BLOCK_M": block_m,
            "BLOCK_N": tile.block_n,
            "NUM_SPLITS": num_splits,
            "MIN_TILES": _min_tiles(tile),
            "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
            "maxnreg": tile.max_registers,
        },
    )


@planned
def _combining_plan(out: Tensor, num_splits: int, tile: AttentionConfiguration) -> Plan:
    num_rows, num_heads, head_dim = out.shape
    return Plan(
        (num_heads, num_rows),
        (stride(out, 0), stride(out, 1)),
        {
            "HEAD_DIM": head_dim,
            "BLOCK_D": triton.next_power_of_2(head_dim),
            "BLOCK_N": tile.block_n,
            "NUM_SPLITS": num_splits,
            "MIN_TILES": _min_tiles(tile),
        },
    )


def _min_tiles(tile: AttentionConfiguration) -> int:
    """Return the fewest tiles in a split."""
    return -(-tile.min_split_keys // tile.block_n)


def scratch_numel(num_rows: int, num_heads: int, head_dim: int, num_splits: int) -> int:
    """Return how many fp32 numbers of scratch `paged_decode` needs for partial results and sums."""
    return 0 if num_splits == 1 else num_rows * num_heads * num_splits * (head_dim + 1)


def _split_scratch(
    scratch: Tensor | None, query: Tensor, num_splits: int
) -> tuple[Tensor | None, Tensor | None]:
    """Return flat views of the scratch for partial results and for their log-sums."""
    if num_splits == 1:
        return None, None
    num_rows, num_heads, head_dim = query.shape
    needed = scratch_numel(num_rows, num_heads, head_dim, num_splits)
    if scratch is None:
        scratch = torch.empty(needed, dtype=torch.float32, device=query.device)
    elif scratch.dtype != torch.float32 or scratch.ndim != 1 or len(scratch) < needed:
        raise ValueError(
            f"scratch is {list(scratch.shape)} {scratch.dtype}; "
            f"it must be one row of at least {needed} float32"
        )
    num_partials = num_rows * num_heads * head_dim * num_splits
    return scratch[:num_partials], scratch[num_partials:needed]
