"""Attention in segments of keys at fixed positions: a token gets the same bits in any batch.

A context is divided at multiples of `segment_keys`, wherever programs are split. Each segment is
computed from zero, and the results are merged one after another, in order: in the registers of a
whole block's program, or by `combine_segments` if the block is split. Both call `merge_segment`. A
segment in which a row sees no key changes nothing. Sinks join last.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.prefill_work import PrefillWork
from kernels.attention.split_results import SplitResults, combining_plan

SEGMENT_KEYS = 1024
"""Keys in a segment; a multiple of the keys in any tile. With shorter segments, shorter contexts
would fill a GPU, but the programs of whole blocks would merge more often."""
_MOST_DOUBLINGS = 20


def make_segment_work(
    query_starts: Tensor,
    context_lens: Tensor,
    tile: tuple[int, int],
    num_tokens: int,
    num_splits: int,
    *,
    window: int | None = None,
    segment_keys: int = SEGMENT_KEYS,
) -> PrefillWork:
    """Divide the longest blocks of query tokens into segments, `num_splits` or fewer in all.

    Which blocks are split changes no bit. The arguments are as in
    `kernels.attention.prefill_work.make_prefill_work`. A CUDA graph can capture the work: sizes
    depend only on shapes.
    """
    block_q, block_n = tile
    tiles, device = segment_keys // block_n, context_lens.device
    starts, contexts = query_starts.int(), context_lens.int()
    # Sequence i begins at block starts[i] // block_q + i. So it has at least as many blocks as it
    # needs; a surplus block is idle.
    first_block = starts[:-1] // block_q + _count(len(contexts), device)
    blocks = _count(num_tokens // block_q + len(contexts), device)
    sequence = torch.searchsorted(first_block, blocks, right=True, out_int32=True) - 1
    first_token = (blocks - first_block[sequence]) * block_q
    query_len = starts.diff()[sequence]
    position = contexts[sequence] - query_len + first_token
    begin = 0 * position if window is None else (position - window + 1).clamp(min=0) // block_n
    end_key = torch.minimum(position + block_q, contexts[sequence])
    end = torch.maximum((end_key + block_n - 1) // block_n, begin)
    is_live = first_token < query_len
    first = begin // tiles
    count = torch.where(is_live, (end + tiles - 1) // tiles - first, 0)

    # The blocks of at least 2 segments are split; if there is no room, those of at least 4, or 8.
    least = 2 ** (1 + _count(_MOST_DOUBLINGS, device)[:, None])
    wanted = torch.where(count >= least, count, 0).sum(1)
    is_split = count >= 2 ** (1 + (wanted > num_splits).sum())
    splits = torch.where(is_split, count, 0)
    ends = splits.cumsum(0, dtype=torch.int32)

    place = _count(num_splits, device)
    owner = torch.searchsorted(ends, place, right=True, out_int32=True)
    is_used = owner < len(blocks)
    owner = owner.clamp(max=len(blocks) - 1)
    first_tile = (first[owner] + place - (ends - splits)[owner]) * tiles
    parts = (
        torch.where(is_used, sequence[owner], -1),
        first_token[owner],
        torch.maximum(begin[owner], first_tile),
        torch.minimum(end[owner], first_tile + tiles),
    )
    whole = (torch.where(is_live & ~is_split, sequence, -1), first_token, begin, end)
    items = torch.cat([torch.stack(parts, 1), torch.stack(whole, 1).flip(0)])

    tokens = _count(num_tokens, device)
    sequence = torch.searchsorted(starts[1:], tokens, right=True, out_int32=True)
    is_token = sequence < len(contexts)
    sequence = sequence.clamp(max=len(contexts) - 1)
    index = tokens - starts[sequence]
    block = first_block[sequence] + index // block_q
    block = block.clamp(max=len(blocks) - 1)
    results = torch.where(is_token, splits[block], 0)
    slot = (ends - splits)[block] * block_q + index % block_q
    rows = torch.stack([tokens, slot, results], 1)
    # The rows of split blocks come first. A split block has at least two splits.
    order = (results == 0).sort(stable=True).indices[: num_splits // 2 * block_q]
    return PrefillWork(items, rows[order], num_splits, block_q, segment_keys)


def _count(length: int, device: torch.device) -> Tensor:
    return torch.arange(length, dtype=torch.int32, device=device)


@triton.jit
def merge_segment(largest, total, attended, log_sum, values):
    """Return the running largest score, total weight and weighted sum with one more segment.

    largest, total, log_sum: [M]; attended, values: [M, D]. `values` are the segment's average, and
    log_sum is log2 of its total weight.

    The multiply-adds are explicit: the compiler may not fuse them in one kernel and leave them
    separate in another.
    """
    new_largest = tl.maximum(largest, log_sum)
    anchor = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    correction = tl.exp2(largest - anchor)
    share = tl.exp2(log_sum - anchor)
    attended = tl.fma(values, share[:, None], attended * correction[:, None])
    return new_largest, tl.fma(total, correction, share), attended


@triton.jit
def merge_sink(largest, total, attended, sink):
    """Return the same with a sink, which has a weight but no value. sink: [M], not in base 2."""
    # As an fma, the product cannot be fused with what follows.
    score = tl.fma(sink, 1.4426950408889634, 0.0)
    return merge_segment(largest, total, attended, score, tl.zeros_like(attended))


@triton.jit
def average(attended, total, factor):
    """Return attended [M, D] * factor / total [M]; zeros where the total is zero."""
    total = tl.where(total > 0, total, 1.0)
    return attended * (factor / total)[:, None], total


def combine_segments(
    results: SplitResults, rows: Tensor, slot_stride: int, sinks: Tensor | None, out: Tensor
) -> None:
    """Do what `kernels.attention.split_results.combine_splits` does, one result after another."""
    plan = combining_plan(out, len(rows), 8)
    combine_segments_kernel[plan.grid](
        out, *results, rows, sinks, len(rows), slot_stride, *plan.scalars, **plan.options
    )


@triton.jit(do_not_specialize=["num_rows", "slot_stride"])
def combine_segments_kernel(
    out_ptr, attended_ptr, log_sum_ptr, rows_ptr, sinks_ptr, num_rows, slot_stride,
    out_token_stride, out_head_stride,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
):
    """Merge the segments of one head in every rows_at_once-th row; grid (heads, rows_at_once).

    The loads of CHUNK results do not wait for the merges before them.
    """
    head = tl.program_id(0) + tl.arange(0, 1)
    dims = tl.arange(0, BLOCK_D)[None, :]
    index = tl.program_id(1)
    num_results = tl.load(rows_ptr + index * 3 + 2)
    while num_results > 0:
        row = tl.load(rows_ptr + index * 3).to(tl.int64)
        first_slot = tl.load(rows_ptr + index * 3 + 1)
        largest = tl.full((1,), float("-inf"), tl.float32)
        total = tl.zeros((1,), tl.float32)
        attended = tl.zeros((1, BLOCK_D), tl.float32)
        for chunk in range(0, num_results, CHUNK):
            for number in tl.static_range(CHUNK):
                result = chunk + number
                slot = (first_slot + result * slot_stride).to(tl.int64) * tl.num_programs(0) + head
                is_result = result < num_results
                log_sum = tl.load(log_sum_ptr + slot, mask=is_result, other=float("-inf"))
                values = tl.load(
                    attended_ptr + slot[:, None] * HEAD_DIM + dims,
                    mask=is_result & (dims < HEAD_DIM),
                    other=0.0,
                )
                largest, total, attended = merge_segment(largest, total, attended, log_sum, values)
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + head).to(tl.float32)
            largest, total, attended = merge_sink(largest, total, attended, sink)
        attended, _ = average(attended, total, 1.0)
        tl.store(
            out_ptr + row * out_token_stride + head[:, None] * out_head_stride + dims,
            attended.to(out_ptr.dtype.element_ty),
            mask=dims < HEAD_DIM,
        )
        index += tl.num_programs(1)
        num_results = tl.load(rows_ptr + index * 3 + 2, mask=index < num_rows, other=0)
