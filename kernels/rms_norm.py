"""Root-mean-square norm of rows in one launch, where transformers' takes six."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.paged_arguments import stride
from kernels.plan import Plan, planned

MAX_WIDTH = 32768
"""A row lies in the registers of one program."""
TILE = 1024
"""Numbers in a program's tile where rows are shorter, so that it takes several."""


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
    WIDTH: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    ROWS_PER_TILE: tl.constexpr,
    WIDTH_TILE: tl.constexpr,
):
    """Program r: the r-th ROWS_PER_TILE rows, heads of a token after each other."""
    row = tl.program_id(0) * ROWS_PER_TILE + tl.arange(0, ROWS_PER_TILE)
    dims = tl.arange(0, WIDTH_TILE)[None, :]
    is_inside = (row < num_rows)[:, None] & (dims < WIDTH)
    token, head = (row // num_heads).to(tl.int64), row % num_heads
    starts = (token * token_stride + head * head_stride)[:, None]
    numbers = tl.load(rows + starts + dims, mask=is_inside, other=0.0).to(tl.float32)
    mean_square = tl.sum(numbers * numbers, 1) / WIDTH
    numbers *= tl.rsqrt(mean_square + eps)[:, None]
    if ROUNDS_FIRST:
        numbers = numbers.to(out.dtype.element_ty).to(tl.float32)
    # For each row again, from L1: as one short row they would be read 2 bytes a thread.
    factors = weight + tl.broadcast_to(dims, ROWS_PER_TILE, WIDTH_TILE)
    factors = tl.load(factors, mask=is_inside, other=0.0).to(tl.float32) + OFFSET
    places = (token * out_token_stride + head * out_head_stride)[:, None] + dims
    tl.store(out + places, (numbers * factors).to(out.dtype.element_ty), mask=is_inside)


def rms_norm(
    rows: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, rounds_first: bool = True
) -> Tensor:
    """`row / sqrt(mean(row²) + eps) * (weight + offset)` of every row, in fp32, then rounded.

    rows: [T, width] or [T, heads, width] in fp16, bf16 or fp32, any strides but rows contiguous;
    weight: [width], contiguous. `rounds_first`: to the rows' type before the weight multiplies,
    too, as Llama does and Gemma (whose offset is 1) does not; then no weight may be of a wider
    type. Returns a new tensor, dense in the order of `rows` in memory. Raises ValueError for other
    shapes and strides.
    """
    out = torch.empty_like(rows)
    grid, numbers, options = _plan(rows, weight, out, rounds_first)
    if grid[0]:
        rms_norm_kernel[grid](
            out, rows, weight, eps, *numbers, OFFSET=offset, ROUNDS_FIRST=rounds_first, **options
        )
    return out


@planned
def _plan(rows: Tensor, weight: Tensor, out: Tensor, rounds_first: bool) -> Plan:
    _check(rows, weight, rounds_first)
    width = rows.shape[-1]
    num_heads = rows.shape[1] if rows.ndim == 3 else 1
    num_rows = rows.shape[0] * num_heads
    width_tile = triton.next_power_of_2(width)
    rows_per_tile = max(1, TILE // width_tile)
    strides = [(stride(each, 0), stride(each, 1) if num_heads > 1 else 0) for each in (rows, out)]
    return Plan(
        (triton.cdiv(num_rows, rows_per_tile),),
        (num_rows, num_heads, *strides[0], *strides[1]),
        {
            "WIDTH": width,
            "ROWS_PER_TILE": rows_per_tile,
            "WIDTH_TILE": width_tile,
            # As many threads as there are 16-byte loads of bf16; a long row is several a thread.
            "num_warps": min(16, max(4, rows_per_tile * width_tile // 256)),
        },
    )


def _check(rows: Tensor, weight: Tensor, rounds_first: bool) -> None:
    width = rows.shape[-1]
    if rows.ndim not in (2, 3) or weight.shape != (width,) or width > MAX_WIDTH:
        raise ValueError(
            f"rows {list(rows.shape)} and weight {list(weight.shape)}; they must be "
            f"[tokens, (heads,) width] and [width], of at most {MAX_WIDTH}"
        )
    if rows.stride(-1) != 1 or weight.stride(0) != 1:
        raise ValueError(f"rows must be contiguous, got {rows.stride()} and {weight.stride()}")
    if rounds_first and torch.promote_types(rows.dtype, weight.dtype) != rows.dtype:
        raise ValueError(f"{weight.dtype} weights would widen rows of {rows.dtype}")
