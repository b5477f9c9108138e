"""Partial results of attention that is split over the keys, and the kernel that combines them."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import stride
from kernels.launch_plan import LaunchPlan, planned

MAX_PROGRAMS = 4096
"""Maximum programs of the combining kernel: enough to fill any GPU. A list may have room for many
more rows than it contains. If each entry had a program, most programs would do nothing."""


class SplitResults(NamedTuple):
    """Scratch for S results of each head, one per slot."""

    attended: Tensor
    """[S, heads, head_dim] fp32, flat."""
    log_sums: Tensor
    """[S, heads] fp32, flat: log2 of the sum of exp2 of the scores; -inf if there are no keys."""


def scratch_numel(num_slots: int, num_heads: int, head_dim: int) -> int:
    """Return the size of the scratch for `num_slots` results of each head, in fp32 numbers."""
    return num_slots * num_heads * (head_dim + 1)


def split_results(scratch: Tensor | None, out: Tensor, num_slots: int) -> SplitResults:
    """Return views of `scratch`, or of new memory if it is None, for rows like those of `out`.

    Raises ValueError if the scratch is too short or not fp32, or if its size needs more than 31
    bits.
    """
    if num_slots == 0:
        return _no_results(out.device)
    num_heads, head_dim = out.shape[1:]
    needed = scratch_numel(num_slots, num_heads, head_dim)
    if needed >= 2**31:  # offsets of 64 bits would make some kernels spill registers
        raise ValueError(f"{num_slots} results of {num_heads} heads are too many for the kernels")
    if scratch is None:
        scratch = torch.empty(needed, dtype=torch.float32, device=out.device)
    elif scratch.dtype != torch.float32 or scratch.ndim != 1 or len(scratch) < needed:
        raise ValueError(
            f"scratch is {list(scratch.shape)} {scratch.dtype}; "
            f"it must be one row of at least {needed} float32"
        )
    num_attended = num_slots * num_heads * head_dim
    return SplitResults(scratch[:num_attended], scratch[num_attended:needed])


@cache
def _no_results(device: torch.device) -> SplitResults:
    """Return results without slots. They are cached, because creating them takes microseconds."""
    empty = torch.empty(0, dtype=torch.float32, device=device)
    return SplitResults(empty, empty)


def combine_splits(
    results: SplitResults, rows: Tensor, slot_stride: int, sinks: Tensor | None, out: Tensor
) -> None:
    """Combine the results of each row's splits into `out` [T, heads, head_dim].

    rows: [R, 3] int32, contiguous: row of `out`, slot of its first result, and number of results.
    The results are `slot_stride` slots apart. A row with one result is skipped, because it is final
    in `out`. The list ends at the first entry without results.
    """
    # 32 results of 512 numbers spill registers on sm_80.
    plan = combining_plan(out, len(rows), 32 if out.shape[2] <= 256 else 16)
    combine_splits_kernel[plan.grid](
        out, *results, rows, sinks, len(rows), slot_stride, *plan.scalars, **plan.options
    )


@planned
def combining_plan(out: Tensor, num_rows: int, chunk: int) -> LaunchPlan:
    """Return the launch of a kernel that combines the results of rows, `chunk` at a time."""
    _, num_heads, head_dim = out.shape
    return LaunchPlan(
        (num_heads, min(num_rows, max(1, MAX_PROGRAMS // num_heads))),
        (stride(out, 0), stride(out, 1)),
        {"HEAD_DIM": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim), "CHUNK": chunk},
    )


@triton.jit(do_not_specialize=["num_rows", "slot_stride"])
def combine_splits_kernel(
    out_ptr, attended_ptr, log_sum_ptr, rows_ptr, sinks_ptr, num_rows, slot_stride,
    out_token_stride, out_head_stride,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
):
    """Combine the splits of one head in every rows_at_once-th row; grid (heads, rows_at_once).

    Splits without keys have a log sum of -inf and no weight.
    """
    head = tl.program_id(0)
    dims = tl.arange(0, BLOCK_D)
    sink = float("-inf")
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
    index = tl.program_id(1)
    num_splits = tl.load(rows_ptr + index * 3 + 2)
    while num_splits > 0:
        if num_splits > 1:
            largest, total = sink, 1.0 if sinks_ptr is not None else 0.0
            row = tl.load(rows_ptr + index * 3).to(tl.int64)
            first_slot = tl.load(rows_ptr + index * 3 + 1)
            combined = tl.zeros((BLOCK_D,), tl.float32)
            for chunk in range(0, num_splits, CHUNK):
                split = chunk + tl.arange(0, CHUNK)
                slot = (first_slot + split * slot_stride).to(tl.int64) * tl.num_programs(0) + head
                log_sums = tl.load(log_sum_ptr + slot, mask=split < num_splits, other=float("-inf"))
                previous, largest = largest, tl.maximum(largest, tl.max(log_sums, 0))
                anchor = tl.where(largest == float("-inf"), 0.0, largest)
                shares = tl.exp2(log_sums - anchor)
                attended = tl.load(
                    attended_ptr + slot[:, None] * HEAD_DIM + dims[None, :],
                    mask=(log_sums > float("-inf"))[:, None] & (dims < HEAD_DIM)[None, :],
                    other=0.0,
                )
                correction = tl.exp2(previous - anchor)
                combined = combined * correction + tl.sum(attended * shares[:, None], 0)
                total = total * correction + tl.sum(shares, 0)
            tl.store(
                out_ptr + row * out_token_stride + head * out_head_stride + dims,
                (combined / tl.where(total > 0, total, 1.0)).to(out_ptr.dtype.element_ty),
                mask=dims < HEAD_DIM,
            )
        index += tl.num_programs(1)
        num_splits = tl.load(rows_ptr + index * 3 + 2, mask=index < num_rows, other=0)
