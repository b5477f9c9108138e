"""RMSNorm of rows in one launch, with or without the residual add before it."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import stride
from kernels.launch_plan import LaunchPlan, planned

MAX_WIDTH = 32768
"""One program holds a whole row in registers."""
TILE = 1024
"""Minimum number of elements per program; a program takes several rows if they are short."""


@triton.jit
def normalize(
    numbers,
    weight,
    eps,
    dims,
    is_inside,
    dtype: tl.constexpr,
    WIDTH: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    ROWS_PER_TILE: tl.constexpr,
    WIDTH_TILE: tl.constexpr,
):
    """Normalize `numbers` [ROWS_PER_TILE, WIDTH_TILE] fp32 by row, and return them in `dtype`.

    weight: a pointer, or pointers [ROWS_PER_TILE, 1].
    """
    mean_square = tl.sum(numbers * numbers, 1) / WIDTH
    numbers *= tl.rsqrt(mean_square + eps)[:, None]
    if ROUNDS_FIRST:
        numbers = numbers.to(dtype).to(tl.float32)
    # The weight is loaded again for each row, from L1. If it were loaded once for all rows, each
    # thread would load only 2 bytes of a short weight.
    factors = weight + tl.broadcast_to(dims, ROWS_PER_TILE, WIDTH_TILE)
    factors = tl.load(factors, mask=is_inside, other=0.0).to(tl.float32) + OFFSET
    return (numbers * factors).to(dtype)


@triton.jit(do_not_specialize=["num_rows", "num_heads"])
def rms_norm_kernel(
    out,
    rows,
    weight,
    eps,
    num_rows,
    num_heads,
    token_stride,
    head_stride,
    out_token_stride,
    out_head_stride,
    WEIGHT_PER_HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    ROWS_PER_TILE: tl.constexpr,
    WIDTH_TILE: tl.constexpr,
):
    """Program r takes the r-th tile of ROWS_PER_TILE rows; row = token * num_heads + head."""
    row = tl.program_id(0) * ROWS_PER_TILE + tl.arange(0, ROWS_PER_TILE)
    dims = tl.arange(0, WIDTH_TILE)[None, :]
    is_inside = (row < num_rows)[:, None] & (dims < WIDTH)
    token, head = (row // num_heads).to(tl.int64), row % num_heads
    starts = (token * token_stride + head * head_stride)[:, None]
    numbers = tl.load(rows + starts + dims, mask=is_inside, other=0.0).to(tl.float32)
    if WEIGHT_PER_HEAD:
        weight += (head * WIDTH)[:, None]
    normed = normalize(
        numbers, weight, eps, dims, is_inside, out.dtype.element_ty,
        WIDTH, OFFSET, ROUNDS_FIRST, ROWS_PER_TILE, WIDTH_TILE,
    )
    places = (token * out_token_stride + head * out_head_stride)[:, None] + dims
    tl.store(out + places, normed, mask=is_inside)


@triton.jit(do_not_specialize=["num_rows"])
def add_rms_norm_kernel(
    total,
    normed,
    hidden,
    output,
    weight,
    eps,
    num_rows,
    hidden_stride,
    output_stride,
    WIDTH: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    ROWS_PER_TILE: tl.constexpr,
    WIDTH_TILE: tl.constexpr,
):
    """Program r takes the r-th tile of ROWS_PER_TILE rows. `total` and `normed` are contiguous."""
    row = tl.program_id(0) * ROWS_PER_TILE + tl.arange(0, ROWS_PER_TILE)
    dims = tl.arange(0, WIDTH_TILE)[None, :]
    is_inside = (row < num_rows)[:, None] & (dims < WIDTH)
    row = row.to(tl.int64)[:, None]
    dtype = total.dtype.element_ty
    numbers = tl.load(hidden + row * hidden_stride + dims, mask=is_inside, other=0.0).to(tl.float32)
    added = tl.load(output + row * output_stride + dims, mask=is_inside, other=0.0)
    rounded = (numbers + added.to(tl.float32)).to(dtype)
    tl.store(total + row * WIDTH + dims, rounded, mask=is_inside)
    result = normalize(
        rounded.to(tl.float32), weight, eps, dims, is_inside, dtype,
        WIDTH, OFFSET, ROUNDS_FIRST, ROWS_PER_TILE, WIDTH_TILE,
    )
    tl.store(normed + row * WIDTH + dims, result, mask=is_inside)


def rms_norm(
    rows: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, rounds_first: bool = True
) -> Tensor:
    """Return `row / sqrt(mean(row²) + eps) * (weight + offset)` for every row.

    rows: [T, width] or [T, heads, width] in fp16, bf16 or fp32; rows contiguous, other strides are
    free. weight: [width], or [heads, width] with one for each head, contiguous. Computed in fp32
    and rounded to the type of `rows`. rounds_first: also round before multiplying by the weight,
    which must then not be of a wider type. Llama does this; Gemma, whose offset is 1, does not. The
    result is dense, with the memory order of `rows`. Raises ValueError for other shapes, strides
    and types.
    """
    out = torch.empty_like(rows)
    grid, scalars, options = _plan(rows, weight, out, rounds_first)
    if grid[0]:
        rms_norm_kernel[grid](
            out, rows, weight, eps, *scalars, OFFSET=offset, ROUNDS_FIRST=rounds_first, **options
        )
    return out


def add_rms_norm(
    hidden: Tensor,
    output: Tensor,
    weight: Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    rounds_first: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return `hidden + output` and the `rms_norm` of this sum, both new tensors.

    The sum is rounded to its type before it is normed, as in two operations. hidden, output:
    [T, width] of one type; rows contiguous, other strides are free. The other arguments and errors
    are those of `rms_norm`.
    """
    grid, scalars, options = _add_plan(hidden, output, weight, rounds_first)
    total, normed = torch.empty_like(hidden), torch.empty_like(hidden)
    if grid[0]:
        add_rms_norm_kernel[grid](
            total, normed, hidden, output, weight, eps, *scalars,
            OFFSET=offset, ROUNDS_FIRST=rounds_first, **options,
        )
    return total, normed


@planned
def _plan(rows: Tensor, weight: Tensor, out: Tensor, rounds_first: bool) -> LaunchPlan:
    _check(rows, weight, rounds_first)
    num_heads = rows.shape[1] if rows.ndim == 3 else 1
    num_rows = rows.shape[0] * num_heads
    strides = [
        (stride(tensor, 0), stride(tensor, 1) if num_heads > 1 else 0) for tensor in (rows, out)
    ]
    tiling = _tiling(rows.shape[-1])
    return LaunchPlan(
        (triton.cdiv(num_rows, tiling["ROWS_PER_TILE"]),),
        (num_rows, num_heads, *strides[0], *strides[1]),
        {"WEIGHT_PER_HEAD": weight.ndim == 2, **tiling},
    )


@planned
def _add_plan(hidden: Tensor, output: Tensor, weight: Tensor, rounds_first: bool) -> LaunchPlan:
    if hidden.ndim != 2 or hidden.shape != output.shape or hidden.dtype != output.dtype:
        raise ValueError(
            f"hidden is {list(hidden.shape)} {hidden.dtype}, output {list(output.shape)} "
            f"{output.dtype}; both must be [tokens, width] of one type"
        )
    for rows in (hidden, output):  # [tokens, width], so the weight has one dimension, too
        _check(rows, weight, rounds_first)
    num_rows, width = hidden.shape
    tiling = _tiling(width)
    return LaunchPlan(
        (triton.cdiv(num_rows, tiling["ROWS_PER_TILE"]),),
        (num_rows, stride(hidden, 0), stride(output, 0)),
        tiling,
    )


def _tiling(width: int) -> dict[str, Any]:
    width_tile = triton.next_power_of_2(width)
    rows_per_tile = max(1, TILE // width_tile)
    return {
        "WIDTH": width,
        "ROWS_PER_TILE": rows_per_tile,
        "WIDTH_TILE": width_tile,
        # One 16-byte load of bf16 per thread; several in a long row.
        "num_warps": min(16, max(4, rows_per_tile * width_tile // 256)),
    }


def _check(rows: Tensor, weight: Tensor, rounds_first: bool) -> None:
    width = rows.shape[-1]
    weights = ((width,), rows.shape[1:])  # for rows [T, width], both are the same
    if rows.ndim not in (2, 3) or weight.shape not in weights or width > MAX_WIDTH:
        raise ValueError(
            f"rows {list(rows.shape)} and weight {list(weight.shape)}; they must be "
            f"[tokens, (heads,) width] and [width] or [heads, width]; width at most {MAX_WIDTH}"
        )
    if rows.stride(-1) != 1 or not weight.is_contiguous():
        raise ValueError(
            f"rows must be contiguous, got strides {rows.stride()} and, of the weight, "
            f"{weight.stride()}"
        )
    if rounds_first and torch.promote_types(rows.dtype, weight.dtype) != rows.dtype:
        raise ValueError(f"{weight.dtype} weights would widen rows of {rows.dtype}")
