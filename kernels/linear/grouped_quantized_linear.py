"""A linear layer of all experts in one launch, with quantized weights and rows sorted by expert.

Programs find their expert as in `grouped_linear`, and multiply by the expert's codes as in
`quantized_linear`. A step therefore reads the codes of the chosen experts only, and no dequantized
weight is ever stored in memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import stride
from kernels.launch_plan import LaunchPlan, planned
from kernels.linear.grouped_linear import experts_read, find_tile, grouped_grid, rows_of_tile
from kernels.linear.quantized_linear import check_codes, quantized_tile, tile_options


@triton.jit(do_not_specialize=["num_experts"])
def grouped_quantized_linear_kernel(
    out_ptr, rows_ptr, codes_ptr, scale_ptr, zero_ptr, ends_ptr,
    num_experts, num_outputs, num_inputs, group_size, row_stride, expert_stride, code_stride,
    EXPERTS: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, PER_BYTE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """Compute one output tile; grid (row tiles * output tiles,)."""
    expert, tile, output_tile = find_tile(
        ends_ptr, num_experts, num_outputs, EXPERTS, GROUP, BLOCK_M, BLOCK_N
    )
    if expert >= num_experts:
        return

    row, is_row = rows_of_tile(ends_ptr, expert, tile, BLOCK_M)
    output = output_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = output < num_outputs
    first_scale = expert.to(tl.int64) * (num_inputs // group_size) * num_outputs
    if zero_ptr is not None:
        zero_ptr += first_scale
    sums = quantized_tile(
        rows_ptr, codes_ptr + expert.to(tl.int64) * expert_stride, scale_ptr + first_scale,
        zero_ptr, row, is_row, output, is_output,
        num_outputs, 0, num_inputs, group_size, row_stride, code_stride,
        KIND, PER_BYTE, BLOCK_M, BLOCK_N, BLOCK_K,
    )
    tl.store(
        out_ptr + row.to(tl.int64)[:, None] * num_outputs + output[None, :],
        sums.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & is_output[None, :],
    )


def grouped_quantized_linear(
    rows: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    ends: Tensor,
    kind: str,
    group_size: int,
    *,
    is_pinned: bool = False,
) -> Tensor:
    """Return `weights[e] @ row` for every row of expert e, [M, N], summed in fp32, then rounded.

    rows: [M, K] in fp16 or bf16, sorted by expert, K contiguous. codes, scales, zeros: as in
    `quantized_linear`, for all experts, which are the first dimension: [E, N, K] or [E, N, K / 2],
    and [E, groups, N]. ends: [E] int32, contiguous, the index after the last row of each expert;
    the last is M. is_pinned: the bits of a row do not depend on M. The result is contiguous, of the
    rows' type. Raises ValueError for other shapes, strides and types, and for groups for which
    `block_size` returns None.
    """
    plan = _plan(rows, codes, scales, zeros, ends, kind, group_size, is_pinned)
    out = rows.new_empty((rows.shape[0], codes.shape[1]))
    if plan.grid[0]:
        grouped_quantized_linear_kernel[plan.grid](
            out, rows, codes, scales, zeros, ends, *plan.scalars, **plan.options
        )
    return out


@planned
def _plan(
    rows: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, ends: Tensor,
    kind: str, group_size: int, is_pinned: bool,
) -> LaunchPlan:
    if (rows.ndim, codes.ndim) != (2, 3) or ends.shape != codes.shape[:1] or not len(ends):
        raise ValueError(
            f"rows {list(rows.shape)}, codes {list(codes.shape)} and ends {list(ends.shape)}; they "
            "must be [M, K], [E, N, columns] and [E], E at least 1"
        )
    if ends.dtype != torch.int32 or not ends.is_contiguous():
        raise ValueError(f"ends are {ends.dtype}; they must be int32 and contiguous")
    (num_rows, num_inputs), (num_experts, num_outputs, _) = rows.shape, codes.shape
    rows_of_expert = triton.cdiv(num_rows, num_experts)
    options = tile_options(rows_of_expert, num_inputs, kind, group_size, is_pinned)
    check_codes(rows, codes, scales, zeros, kind, group_size)
    strides = (stride(rows, 0), stride(codes, 0), stride(codes, 1))
    return LaunchPlan(
        grouped_grid(num_rows, num_experts, num_outputs, options["BLOCK_M"], options["BLOCK_N"]),
        (num_experts, num_outputs, num_inputs, group_size, *strides),
        {"EXPERTS": experts_read(num_experts), **options},
    )
