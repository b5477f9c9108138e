"""Partial results of attention that is split over the keys, and the kernel that combines them."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.paged_arguments import stride
from kernels.plan import Plan, planned


class SplitResults(NamedTuple):
    """Scratch for S results of each head, one per slot."""

    attended: Tensor
    """[S, heads, head_dim] fp32, flat."""
    log_sums: Tensor
    """[S, heads] fp32, flat: log2 of the sum of exp2 of the scores; -inf if there was no key."""


def scratch_numel(num_slots: int, num_heads: int, head_dim: int) -> int:
    """Return how many fp32 numbers of scratch `num_slots` results of all heads take."""
    return num_slots * num_heads * (head_dim + 1)


def split_results(scratch: Tensor | None, query: Tensor, num_slots: int) -> SplitResults:
    """Lay the results out in `scratch`, or in new memory if it is None.

    Raises ValueError if the scratch is too short or not fp32, or if 32 bits do not count it.
    """
    if num_slots == 0:
        return _no_results(query.device)
    num_heads, head_dim = query.shape[1:]
    needed = scratch_numel(num_slots, num_heads, head_dim)
    if needed >= 2**31:  # offsets of 64 bits would make some kernels spill registers
        raise ValueError(f"{num_slots} results of {num_heads} heads are too many for the kernels")
    if scratch is None:
        scratch = torch.empty(needed, dtype=torch.float32, device=query.device)
    elif scratch.dtype != torch.float32 or scratch.ndim != 1 or len(scratch) < needed:
        raise ValueError(
            f"scratch is {list(scratch.shape)} {scratch.dtype}; "
            f"it must be one row of at least {needed} float32"
        )
    num_attended = num_slots * num_heads * head_dim
    return SplitResults(scratch[:num_attended], scratch[num_attended:needed])


@cache
def _no_results(device: torch.device) -> SplitResults:
    """Return results without slots. Layers share them: making them anew takes microseconds."""
    empty = torch.empty(0, dtype=torch.float32, device=device)
    return SplitResults(empty, empty)


def combine_items(results: SplitResults, starts: Tensor, sinks: Tensor | None, out: Tensor) -> None:
    """Combine the items of a work list into `out` [N, heads, head_dim]; slots are items.

    Rows with one item are left unchanged.
    """
    plan = _plan(out)
    combine_splits_kernel[plan.grid](
        out, *results, starts, sinks, None, 0, *plan.numbers, **plan.options
    )


def combine_equal(
    results: SplitResults,
    num_splits: int,
    query_starts: Tensor,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    """Combine `num_splits` results of each row into `out` [T, heads, head_dim].

    The first slots are those of row 0. Rows from query_starts[-1] on are left unchanged.
    """
    plan = _plan(out)
    combine_splits_kernel[plan.grid](
        out, *results, query_starts, sinks, num_splits, len(query_starts) - 1,
        *plan.numbers, **plan.options,
    )  # fmt: skip


@planned
def _plan(out: Tensor) -> Plan:
    num_rows, num_heads, head_dim = out.shape
    return Plan(
        (num_heads, num_rows),
        (stride(out, 0), stride(out, 1)),
        {"HEAD_DIM": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim), "CHUNK": 32},
    )


@triton.jit(
    do_not_specialize=["num_splits", "num_sequences"],
    do_not_specialize_on_alignment=["starts_ptr"],
)
def combine_splits_kernel(
    out_ptr, attended_ptr, log_sum_ptr, starts_ptr, sinks_ptr, num_splits, num_sequences,
    out_token_stride, out_head_stride,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Combine the splits of one head; grid (heads, rows).

    starts_ptr: the slots of each row if `num_splits` is None; else query_starts, of which only the
    end is read. Results without keys were not written, so they are not read.
    """
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if num_splits is None:
        first = tl.load(starts_ptr + row).to(tl.int64)
        end = tl.load(starts_ptr + row + 1).to(tl.int64)
        if end - first == 1:
            return
    else:
        if row >= tl.load(starts_ptr + num_sequences):
            return
        first = row * num_splits
        end = first + num_splits
    dims = tl.arange(0, BLOCK_D)
    if sinks_ptr is None:
        largest = float("-inf")
        total = 0.0
    else:
        largest = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
        total = 1.0
    combined = tl.zeros((BLOCK_D,), tl.float32)
    for chunk in range(first, end, CHUNK):
        split = chunk + tl.arange(0, CHUNK)
        slot = split * tl.num_programs(0) + head
        log_sums = tl.load(log_sum_ptr + slot, mask=split < end, other=float("-inf"))
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
