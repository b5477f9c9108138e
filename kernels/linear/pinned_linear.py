"""A linear layer that gives a row the same bits, however many other rows there are.

cuBLAS chooses its algorithm by the number of rows, and with it the order of sums. Here the tiles
are those of a pinned `grouped_linear` with one expert.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import stride
from kernels.launch_plan import LaunchPlan, planned
from kernels.linear.grouped_linear import DTYPES, pinned_options, product_tile


@triton.jit
def tile_place(
    num_rows, num_outputs, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return the rows [BLOCK_M] of this program's tile and which of them exist, then its outputs
    [BLOCK_N] and which of them exist. Grid: (row tiles * output tiles,)."""
    num_output_tiles = tl.cdiv(num_outputs, BLOCK_N)
    row_tile, output_tile = tl.swizzle2d(
        tl.program_id(0) // num_output_tiles, tl.program_id(0) % num_output_tiles,
        tl.cdiv(num_rows, BLOCK_M), num_output_tiles, GROUP,
    )
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = row < num_rows
    output = output_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = output < num_outputs
    return row, is_row, output, is_output


@triton.jit(do_not_specialize=["num_rows"])
def pinned_linear_kernel(
    out_ptr, rows_ptr, weight_ptr, bias_ptr, num_rows, num_outputs, num_inputs,
    row_stride, output_stride,
    IS_EVEN: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):
    """Compute one output tile; grid (row tiles * output tiles,).

    IS_EVEN: BLOCK_K divides the number of inputs.
    """
    row, is_row, output, is_output = tile_place(num_rows, num_outputs, GROUP, BLOCK_M, BLOCK_N)
    sums = product_tile(
        rows_ptr, weight_ptr, row, is_row, output, is_output, num_inputs, row_stride, output_stride,
        IS_EVEN, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
    )
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out_ptr + row.to(tl.int64)[:, None] * num_outputs + output[None, :],
        sums.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & is_output[None, :],
    )


def pinned_linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `rows @ weight.T + bias`, [M, N] contiguous of the rows' type, summed in fp32.

    rows: [M, K], weight: [N, K], of one type, fp16, bf16 or fp32; K contiguous in both. bias: [N],
    contiguous. The bits of a row do not depend on M. Raises ValueError for other shapes, strides
    and types.
    """
    plan = _plan(rows, weight, bias)
    out = rows.new_empty((rows.shape[0], weight.shape[0]))
    if plan.grid[0]:
        pinned_linear_kernel[plan.grid](
            out, rows, weight, bias, *plan.scalars, **plan.options
        )
    return out


@planned
def _plan(rows: Tensor, weight: Tensor, bias: Tensor | None) -> LaunchPlan:
    shapes = f"rows {list(rows.shape)} and weight {list(weight.shape)}"
    if (rows.ndim, weight.ndim) != (2, 2) or rows.shape[1] != weight.shape[1]:
        raise ValueError(f"{shapes}; they must be [M, K] and [N, K]")
    (num_rows, num_inputs), num_outputs = rows.shape, weight.shape[0]
    if rows.stride(1) != 1 or weight.stride(1) != 1 or rows.dtype not in DTYPES:
        raise ValueError(f"{shapes}, {rows.dtype}; they must be bf16, fp16 or fp32, K contiguous")
    if weight.dtype != rows.dtype:
        raise ValueError(f"rows are {rows.dtype}, but the weight is {weight.dtype}")
    if bias is not None and (bias.shape != (num_outputs,) or not bias.is_contiguous()):
        raise ValueError(f"bias is {list(bias.shape)}; it must be [{num_outputs}] and contiguous")
    options = pinned_options(num_rows, num_inputs, rows.dtype)
    num_row_tiles = triton.cdiv(num_rows, options["BLOCK_M"])
    return LaunchPlan(
        (num_row_tiles * triton.cdiv(num_outputs, options["BLOCK_N"]),),
        (num_rows, num_outputs, num_inputs, stride(rows, 0), stride(weight, 0)),
        options,
    )
