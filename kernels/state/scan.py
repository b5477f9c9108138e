"""Mamba's recurrence, token by token: each number of a state has a decay of its own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import is_aligned, stride
from kernels.launch_plan import LaunchPlan, planned
from kernels.state.batch import StateBatch
from kernels.state.rows import DIMS, ROW_DTYPES, STATE_DTYPES

CELLS = 1024
"""Numbers of a state in a program, of as many channels as have so many."""


@triton.jit
def scan_kernel(
    out, query, key, value, rate, scale, skip, states, starts, reads, writes,
    num_channels, query_stride, key_stride, value_stride, slot_stride,
    SIZE: tl.constexpr, CHANNELS: tl.constexpr,
):
    """Program (i, c) computes the c-th part of the channels of sequence i."""
    sequence = tl.program_id(0)
    read = tl.load(reads + sequence)
    units = tl.arange(0, SIZE)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_inside = channels < num_channels
    cells = (units * num_channels)[:, None] + channels[None, :]
    scales = tl.load(scale + cells, mask=is_inside[None, :], other=0.0)
    skips = tl.load(skip + channels, mask=is_inside, other=0.0)
    # Masked: a slot that is not read may hold NaN.
    is_known = is_inside[None, :] & (read >= 0)
    state = tl.load(states + read * slot_stride + cells, mask=is_known, other=0).to(tl.float32)
    start = tl.load(starts + sequence)
    for offset in range(0, tl.load(starts + sequence + 1) - start):
        token = start.to(tl.int64) + offset
        keys = tl.load(key + token * key_stride + units).to(tl.float32)
        queries = tl.load(query + token * query_stride + units).to(tl.float32)
        values = tl.load(value + token * value_stride + channels, mask=is_inside, other=0)
        values = values.to(tl.float32)
        places = token * num_channels + channels
        rates = tl.load(rate + places, mask=is_inside, other=0.0)
        state *= tl.exp(scales * rates[None, :])
        state += keys[:, None] * (rates * values)[None, :]
        result = tl.sum(queries[:, None] * state, 0) + skips * values
        tl.store(out + places, result.to(out.dtype.element_ty), mask=is_inside)
        write = tl.load(writes + token)
        if write >= 0:
            kept = state.to(states.dtype.element_ty)
            tl.store(states + write * slot_stride + cells, kept, mask=is_inside[None, :])


def scan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rate: Tensor,
    scale: Tensor,
    skip: Tensor,
    states: Tensor,
    batch: StateBatch,
) -> Tensor:
    """Same as `kernels.state.reference.scan`. Raises ValueError for other shapes, strides and types
    than those of `kernels.state.rows`."""
    _check(query, key, value, rate, scale, skip, states)
    out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    plan = _plan(query, key, value, states, len(batch.reads))
    scan_kernel[plan.grid](
        out, query, key, value, rate, scale, skip, states,
        batch.starts, batch.reads, batch.writes, *plan.scalars, **plan.options,
    )
    return out


@planned
def _check(
    query: Tensor, key: Tensor, value: Tensor, rate: Tensor, scale: Tensor, skip: Tensor,
    states: Tensor,
) -> None:
    """Raise ValueError for tensors that the kernel does not support."""
    size, num_channels = scale.shape
    if size not in DIMS or num_channels % 16 or states.dtype not in STATE_DTYPES:
        raise ValueError(
            f"states are {size} x {num_channels} {states.dtype}; the first must be among {DIMS}, "
            "the second a multiple of 16, and the type float32 or bfloat16; "
            "kernels.state.reference takes any"
        )
    if states.shape[1:] != scale.shape or not states[:1].is_contiguous() or states.stride(0) % 16:
        raise ValueError(
            f"states are {list(states.shape)}; a slot must be dense, {[size, num_channels]}, and "
            "the stride between slots a multiple of 16 elements"
        )
    for rows, width in ((query, size), (key, size), (value, num_channels)):
        if rows.dtype not in ROW_DTYPES or rows.dtype != value.dtype or rows.shape[1] != width:
            raise ValueError(f"rows are {rows.dtype} {list(rows.shape)}; expected {width} columns")
        if rows.stride(1) != 1:
            raise ValueError("rows must be dense in the last dim")
    if not is_aligned(value):
        raise ValueError(f"the strides of values, {value.stride()}, must be multiples of 16")
    for gates in (rate, scale, skip):
        if gates.dtype != torch.float32 or not gates.is_contiguous():
            raise ValueError("gates must be contiguous fp32")


@planned
def _plan(query: Tensor, key: Tensor, value: Tensor, states: Tensor, count: int) -> LaunchPlan:
    num_channels, size = value.shape[1], query.shape[1]
    channels = max(16, CELLS // size)
    return LaunchPlan(
        (count, triton.cdiv(num_channels, channels)),
        (num_channels, *(stride(rows, 0) for rows in (query, key, value)), states.stride(0)),
        {"SIZE": size, "CHANNELS": channels},
    )
