"""Short convolutions over the tokens of sequences, with the last inputs as state."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import stride
from kernels.launch_plan import LaunchPlan, planned
from kernels.state.batch import StateBatch
from kernels.state.rows import MAX_TAPS, sequence_of

CHANNELS = 1024
"""Most channels of a program."""


@triton.jit
def window_inputs(
    token, start, read, rows, before, tails, taps, is_inside, channels,
    row_stride, before_stride, slot_stride, num_channels, TAPS: tl.constexpr,
):
    """Return the inputs of a token's taps, [MAX_TAPS, channels], the latest at TAPS - 1."""
    place = token - (TAPS - 1) + taps
    is_row = (place >= start) & (taps < TAPS)
    is_new = is_row[:, None] & is_inside[None, :]
    inputs = tl.load(rows + (place * row_stride)[:, None] + channels[None, :], mask=is_new, other=0)
    if before is not None:
        factors = before + (place * before_stride)[:, None] + channels[None, :]
        factor = tl.load(factors, mask=is_new, other=0).to(tl.float32)
        inputs = (inputs.to(tl.float32) * factor).to(inputs.dtype)
    kept = TAPS - 1 + place - start
    is_old = (place < start)[:, None] & is_inside[None, :] & (read >= 0)
    old = tails + read * slot_stride + (kept * num_channels)[:, None] + channels[None, :]
    return tl.where(is_row[:, None], inputs, tl.load(old, mask=is_old, other=0))


@triton.jit
def store_tail(
    tails, write, inputs, taps, is_inside, channels, slot_stride, num_channels, TAPS: tl.constexpr
):
    """Store the last TAPS - 1 of a token's inputs."""
    places = tails + write * slot_stride + ((taps - 1) * num_channels)[:, None] + channels[None, :]
    is_kept = ((taps > 0) & (taps < TAPS))[:, None] & is_inside[None, :]
    tl.store(places, inputs, mask=is_kept)


@triton.jit(do_not_specialize=["num_sequences", "num_decodes"])
def conv_rows_kernel(
    out, rows, weight, bias, before, after, tails, starts, reads, writes,
    num_sequences, num_decodes,
    num_channels, row_stride, before_stride, after_stride, slot_stride,
    TAPS: tl.constexpr, MAX_TAPS: tl.constexpr, SILU: tl.constexpr, CHANNELS: tl.constexpr,
):
    """Program (t, i) computes the i-th part of the channels of token t.

    A program reads an old tail only for a sequence's first TAPS - 1 tokens. These share a program,
    and no other one writes in this launch. So a slot may be read and written.
    """
    first = tl.program_id(0)
    sequence, start, end = first, first, first + 1
    if first >= num_decodes:
        sequence = sequence_of(first, starts, num_sequences)
        start = tl.load(starts + sequence)
        end = tl.minimum(tl.load(starts + sequence + 1), start + TAPS - 1)
        if first >= start + TAPS - 1:
            end = first + 1
        elif first > start:
            end = first  # the program of the first token computes this one
    read = tl.load(reads + sequence)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_inside, taps = channels < num_channels, tl.arange(0, MAX_TAPS)
    weights = weight + (taps * num_channels)[:, None] + channels[None, :]
    is_tap = (taps < TAPS)[:, None] & is_inside[None, :]
    dtype = out.dtype.element_ty
    for offset in range(0, end - first):
        token = first.to(tl.int64) + offset
        inputs = window_inputs(
            token, start, read, rows, before, tails, taps, is_inside, channels,
            row_stride, before_stride, slot_stride, num_channels, TAPS,
        )
        factors = tl.load(weights, mask=is_tap, other=0).to(tl.float32)
        total = tl.sum(inputs.to(tl.float32) * factors, 0)
        if bias is not None:
            total += tl.load(bias + channels, mask=is_inside, other=0).to(tl.float32)
        if SILU:
            total = total.to(dtype).to(tl.float32)
            total = total / (1.0 + tl.exp2(total * -1.4426950408889634))
        if after is not None:
            factor = tl.load(after + token * after_stride + channels, mask=is_inside, other=0)
            total = total.to(dtype).to(tl.float32) * factor.to(tl.float32)
        tl.store(out + token * num_channels + channels, total.to(dtype), mask=is_inside)
        write = tl.load(writes + token)
        if (write >= 0) & (token < start + TAPS - 1):
            tl.debug_barrier()  # the slot may be the one that other threads read
            store_tail(
                tails, write, inputs, taps, is_inside, channels, slot_stride, num_channels, TAPS
            )
            tl.debug_barrier()


@triton.jit(do_not_specialize=["num_sequences", "num_decodes"])
def keep_tails_kernel(
    rows, before, tails, starts, writes, num_sequences, num_decodes,
    num_channels, row_stride, before_stride, slot_stride,
    TAPS: tl.constexpr, MAX_TAPS: tl.constexpr, CHANNELS: tl.constexpr,
):
    """Write the tails that hold new inputs only, after all old ones have been read."""
    token = tl.program_id(0) + num_decodes
    write = tl.load(writes + token)
    if write < 0:
        return
    start = tl.load(starts + sequence_of(token, starts, num_sequences))
    if token < start + TAPS - 1:
        return
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_inside, taps = channels < num_channels, tl.arange(0, MAX_TAPS)
    inputs = window_inputs(
        token.to(tl.int64), start, write * 0 - 1, rows, before, tails, taps, is_inside, channels,
        row_stride, before_stride, slot_stride, num_channels, TAPS,
    )
    store_tail(tails, write, inputs, taps, is_inside, channels, slot_stride, num_channels, TAPS)


def conv_rows(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tails: Tensor,
    batch: StateBatch,
    *,
    silu: bool = False,
    before: Tensor | None = None,
    after: Tensor | None = None,
) -> Tensor:
    """Same as `kernels.state.reference.conv_rows`, for 2 to 4 taps.

    Raises ValueError for other shapes, strides and types.
    """
    out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    plan = _plan(rows, weight, tails, before, after)
    (num_tokens, num_parts), scalars, options = plan
    if not num_tokens:
        return out
    counts = len(batch.reads), batch.num_decodes
    conv_rows_kernel[plan.grid](
        out, rows, weight, bias, before, after, tails, batch.starts, batch.reads, batch.writes,
        *counts, *scalars, SILU=silu, **options,
    )
    if num_tokens > batch.num_decodes:
        num_channels, row_stride, before_stride, _, slot_stride = scalars
        keep_tails_kernel[num_tokens - batch.num_decodes, num_parts](
            rows, before, tails, batch.starts, batch.writes, *counts,
            num_channels, row_stride, before_stride, slot_stride, **options,
        )
    return out


@planned
def _plan(
    rows: Tensor, weight: Tensor, tails: Tensor, before: Tensor | None, after: Tensor | None
) -> LaunchPlan:
    (num_tokens, num_channels), taps = rows.shape, len(weight)
    if not 2 <= taps <= MAX_TAPS or weight.shape[1] != num_channels or not weight.is_contiguous():
        raise ValueError(
            f"the weight is {list(weight.shape)}; it must be [taps, {num_channels}], contiguous, "
            f"with 2 to {MAX_TAPS} taps; kernels.state.reference takes more"
        )
    if tails.shape[1:] != (taps - 1, num_channels) or not tails[:1].is_contiguous():
        raise ValueError(
            f"tails are {list(tails.shape)}; a slot must be dense, [{taps - 1}, {num_channels}]"
        )
    for each in (rows, before, after):
        if each is not None and (each.stride(1) != 1 or each.shape != rows.shape):
            raise ValueError(
                f"rows are {list(each.shape)} with strides {each.stride()}; all must be alike and "
                "dense in the last dim"
            )
    if tails.dtype != rows.dtype:
        raise ValueError(f"tails are {tails.dtype} and rows {rows.dtype}; they must be alike")
    channels = min(CHANNELS, triton.next_power_of_2(num_channels))
    strides = [0 if each is None else stride(each, 0) for each in (rows, before, after)]
    return LaunchPlan(
        (num_tokens, triton.cdiv(num_channels, channels)),
        (num_channels, *strides, tails.stride(0)),
        {"TAPS": taps, "MAX_TAPS": triton.next_power_of_2(taps), "CHANNELS": channels},
    )
