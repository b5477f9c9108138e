"""A linear layer of all experts in one launch, for rows that are sorted by expert.

A program computes one tile of one expert's outputs. Programs find their expert on the device, so
the grid depends only on shapes: nothing waits for the device, and a CUDA graph can be replayed with
other `ends`. torch's own grouped matmul does this too, but only in bf16 on sm_90 and sm_100;
elsewhere it copies `ends` to the host and loops over the experts.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import stride
from kernels.launch_plan import LaunchPlan, planned

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
GROUP = 8
"""Row tiles that use the same tile of weights in turn, so that rows and weights stay in L2 (as in
Triton's tutorial on matrix multiplication)."""
MIN_EXPERTS = 128
"""A program reads the ends of at least this many experts, one per thread. Models with fewer experts
therefore share their kernels."""
PINNED_ROWS = 64
"""Fewest rows of a pinned tile in 16 bits. wgmma, the tensor core instruction of sm_90, needs 64:
with fewer, another instruction would sum in another way."""


@triton.jit
def find_tile(
    ends_ptr, num_experts, num_outputs,
    EXPERTS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Return the expert, the row tile (its index among the expert's row tiles), and the output tile
    of this program.

    Experts without rows have no tiles. Past the last tile, the expert is at least num_experts.
    EXPERTS: a power of two that is at least num_experts.
    """
    num_output_tiles = tl.cdiv(num_outputs, BLOCK_N)
    row_tile, output_tile = tl.swizzle2d(
        tl.program_id(0) // num_output_tiles, tl.program_id(0) % num_output_tiles,
        tl.num_programs(0) // num_output_tiles, num_output_tiles, GROUP,
    )
    expert = tl.arange(0, EXPERTS)
    is_expert = expert < num_experts
    end = tl.load(ends_ptr + expert, mask=is_expert, other=0)
    start = tl.load(ends_ptr + expert - 1, mask=is_expert & (expert > 0), other=0)
    tile_end = tl.cumsum(tl.cdiv(end - start, BLOCK_M), 0)
    is_before = tile_end <= row_tile
    first_tile = tl.max(tl.where(is_before, tile_end, 0), 0)
    return tl.sum(is_before.to(tl.int32), 0), row_tile - first_tile, output_tile


@triton.jit
def rows_of_tile(ends_ptr, expert, tile, BLOCK_M: tl.constexpr):
    """Return the rows [BLOCK_M] of an expert's tile `tile`, and which of them the expert has."""
    start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    row = start + tile * BLOCK_M + tl.arange(0, BLOCK_M)
    return row, row < tl.load(ends_ptr + expert)


@triton.jit
def product_tile(
    rows_ptr, weights_ptr, row, is_row, output, is_output, num_inputs, row_stride, output_stride,
    IS_EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):
    """Return the products [BLOCK_M, BLOCK_N] in fp32 of these rows and outputs of one weight."""
    is_row, is_output = is_row[:, None], is_output[:, None]
    inputs = tl.arange(0, BLOCK_K)[None, :]
    row_ptrs = rows_ptr + row.to(tl.int64)[:, None] * row_stride + inputs
    weight_ptrs = weights_ptr + output.to(tl.int64)[:, None] * output_stride + inputs
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, num_inputs, BLOCK_K):
        if IS_EVEN:
            rows = tl.load(row_ptrs + first, mask=is_row, other=0.0)
            weights = tl.load(weight_ptrs + first, mask=is_output, other=0.0)
        else:
            is_input = first + inputs < num_inputs
            rows = tl.load(row_ptrs + first, mask=is_row & is_input, other=0.0)
            weights = tl.load(weight_ptrs + first, mask=is_output & is_input, other=0.0)
        sums = tl.dot(rows, weights.T, sums, input_precision=PRECISION)
    return sums


@triton.jit(do_not_specialize=["num_experts"])
def grouped_linear_kernel(
    out_ptr, rows_ptr, weights_ptr, ends_ptr, num_experts, num_outputs, num_inputs,
    row_stride, expert_stride, output_stride,
    EXPERTS: tl.constexpr, IS_EVEN: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):
    """Compute one output tile; grid (row tiles * output tiles,).

    IS_EVEN: BLOCK_K divides the number of inputs.
    """
    expert, tile, output_tile = find_tile(
        ends_ptr, num_experts, num_outputs, EXPERTS, GROUP, BLOCK_M, BLOCK_N
    )
    if expert >= num_experts:
        return

    row, is_row = rows_of_tile(ends_ptr, expert, tile, BLOCK_M)
    output = output_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = output < num_outputs
    sums = product_tile(
        rows_ptr, weights_ptr + expert.to(tl.int64) * expert_stride, row, is_row, output, is_output,
        num_inputs, row_stride, output_stride, IS_EVEN, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
    )
    tl.store(
        out_ptr + row.to(tl.int64)[:, None] * num_outputs + output[None, :],
        sums.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & is_output[None, :],
    )


def grouped_linear(
    rows: Tensor, weights: Tensor, ends: Tensor, *, is_pinned: bool = False
) -> Tensor:
    """Return `weights[e] @ row` for every row of expert e, summed in fp32, then rounded.

    rows: [M, K] in fp16, bf16 or fp32, sorted by expert; weights: [E, N, K] of the same type; K
    contiguous in both, other strides are free. ends: [E] int32, contiguous, the index after the
    last row of each expert; the last is M. is_pinned: the bits of a row do not depend on M. The
    result is [M, N], contiguous, of the rows' type. Raises ValueError for other shapes, strides and
    types.
    """
    plan = _plan(rows, weights, ends, is_pinned)
    out = rows.new_empty((rows.shape[0], weights.shape[1]))
    if plan.grid[0]:
        grouped_linear_kernel[plan.grid](out, rows, weights, ends, *plan.scalars, **plan.options)
    return out


@planned
def _plan(rows: Tensor, weights: Tensor, ends: Tensor, is_pinned: bool) -> LaunchPlan:
    _check(rows, weights, ends)
    num_rows, num_inputs = rows.shape
    num_experts, num_outputs, _ = weights.shape
    strides = (stride(rows, 0), stride(weights, 0), stride(weights, 1))
    rows_of_expert = -(-num_rows // num_experts)
    if is_pinned:
        options = pinned_options(rows_of_expert, num_inputs, rows.dtype)
    else:
        is_even = not any(size % 16 for size in (num_inputs, *strides))
        options = _fastest_options(rows_of_expert, num_inputs, rows.dtype, is_even)
    return LaunchPlan(
        grouped_grid(num_rows, num_experts, num_outputs, options["BLOCK_M"], options["BLOCK_N"]),
        (num_experts, num_outputs, num_inputs, *strides),
        {"EXPERTS": experts_read(num_experts), **options},
    )


def _fastest_options(
    num_rows: int, num_inputs: int, dtype: torch.dtype, is_even: bool
) -> dict[str, Any]:
    # A tile has about as many rows as an expert, so that few weights are read twice.
    block_m = min(max(16, triton.next_power_of_2(num_rows)), 128)
    block_n = 64
    if dtype == torch.float32 or not is_even:
        # Products in fp32, and loads of single numbers, need many registers.
        block_m = min(block_m, 32)
    elif block_m >= 64:
        block_n = 128
    return _options(block_m, block_n, num_inputs, dtype)


def pinned_options(num_rows: int, num_inputs: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the constants and options of a kernel whose sums do not depend on `num_rows`.

    The sum of a row depends on the instruction and on BLOCK_K, which are the same for few rows and
    for many. With few, tiles have fewer outputs, so that more programs read the weight.
    """
    if dtype == torch.float32:
        # With 4 warps, the assembler spills registers of some of these kernels.
        return _options(32, 64, num_inputs, dtype) | {"num_warps": 8}
    if num_inputs % 16:
        return _options(32, 64, num_inputs, dtype)
    size = (PINNED_ROWS, 32) if num_rows <= PINNED_ROWS else (128, 128)
    return _options(*size, num_inputs, dtype)


def _options(block_m: int, block_n: int, num_inputs: int, dtype: torch.dtype) -> dict[str, Any]:
    block_k = 128 // dtype.itemsize  # a cache line
    return {
        "IS_EVEN": num_inputs % block_k == 0,
        "GROUP": GROUP,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "num_warps": 8 if block_m == 128 else 4,
        "num_stages": 3 if block_m >= 64 else 4,
    }


def grouped_grid(
    num_rows: int, num_experts: int, num_outputs: int, block_m: int, block_n: int
) -> tuple[int, ...]:
    """Return the grid for tiles of block_m rows and block_n outputs, for any `ends`."""
    # An upper bound on the tiles: the last tile of each expert may have a single row.
    num_last = min(num_experts, num_rows)
    num_row_tiles = num_last + (num_rows - num_last) // block_m
    return (num_row_tiles * -(-num_outputs // block_n),)


def experts_read(num_experts: int) -> int:
    """Return the constant EXPERTS of `find_tile`."""
    return max(MIN_EXPERTS, 1 << (num_experts - 1).bit_length())


def _check(rows: Tensor, weights: Tensor, ends: Tensor) -> None:
    shapes = f"rows {list(rows.shape)}, weights {list(weights.shape)} and ends {list(ends.shape)}"
    if (
        (rows.ndim, weights.ndim) != (2, 3)
        or rows.shape[1] != weights.shape[2]
        or ends.shape != weights.shape[:1]
        or not ends.shape[0]
    ):
        raise ValueError(f"{shapes}; they must be [M, K], [E, N, K] and [E], E at least 1")
    if rows.stride(-1) != 1 or weights.stride(-1) != 1 or ends.stride(0) != 1:
        raise ValueError(
            f"the last dimension must be contiguous, got strides {rows.stride()}, "
            f"{weights.stride()} and {ends.stride()}"
        )
    if rows.dtype not in DTYPES or weights.dtype != rows.dtype or ends.dtype != torch.int32:
        raise ValueError(
            f"rows are {rows.dtype}, weights {weights.dtype} and ends {ends.dtype}; rows and "
            "weights must be of one type, bf16, fp16 or fp32, and ends int32"
        )
