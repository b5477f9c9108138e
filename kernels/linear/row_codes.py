"""Rows as fp8 numbers, each row with a scale of its own, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import stride
from kernels.launch_plan import LaunchPlan, planned

MAX_BLOCK = 8192
"""Numbers that a program reads at once."""


@triton.jit
def row_codes_kernel(codes_ptr, scale_ptr, rows_ptr, width, row_stride, BLOCK: tl.constexpr):
    """Program t encodes row t."""
    row = tl.program_id(0).to(tl.int64)
    rows_ptr += row * row_stride
    codes_ptr += row * width
    largest = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, width, BLOCK):
        place = first + tl.arange(0, BLOCK)
        numbers = tl.load(rows_ptr + place, mask=place < width, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(numbers))
    scale = tl.div_rn(tl.maximum(tl.max(largest, 0), 1e-12), 448.0)
    tl.store(scale_ptr + row, scale)
    for first in range(0, width, BLOCK):
        place = first + tl.arange(0, BLOCK)
        numbers = tl.load(rows_ptr + place, mask=place < width, other=0.0).to(tl.float32)
        codes = tl.clamp(tl.div_rn(numbers, scale), -448.0, 448.0)
        tl.store(codes_ptr + place, codes.to(codes_ptr.dtype.element_ty), mask=place < width)


def row_codes(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows [T, width] as fp8 e4m3 codes [T, width], and their scales, [T, 1] fp32.

    A row's largest number becomes 448, the largest of e4m3; the others are rounded to the nearest.
    The last dimension must be contiguous. Needs a GPU with fp8 (sm_89 or newer).
    """
    codes = torch.empty(rows.shape, dtype=torch.float8_e4m3fn, device=rows.device)
    scales = torch.empty(rows.shape[0], 1, device=rows.device)
    plan = _plan(rows)
    if plan.grid[0]:
        row_codes_kernel[plan.grid](codes, scales, rows, *plan.scalars, **plan.options)
    return codes, scales


@planned
def _plan(rows: Tensor) -> LaunchPlan:
    num_rows, width = rows.shape
    if rows.stride(1) != 1:
        raise ValueError(f"rows have strides {rows.stride()}; the last must be 1")
    block = min(triton.next_power_of_2(width), MAX_BLOCK)
    return LaunchPlan(
        (num_rows,),
        (width, stride(rows, 0)),
        {"BLOCK": block, "num_warps": min(8, max(1, block // 512))},
    )
