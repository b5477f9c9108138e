"""Quantized weights as 16-bit numbers, for products of many rows, where libraries are faster."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import stride
from kernels.launch_plan import LaunchPlan, planned
from kernels.linear.quantized_linear import PER_BYTE, block_size, decoded, scale_and_zero

BLOCK_N = 64


@triton.jit
def dequantize_kernel(
    out_ptr, codes_ptr, scale_ptr, zero_ptr, num_outputs, num_inputs, group_size, code_stride,
    KIND: tl.constexpr, PER_BYTE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """Write the weights of one tile of codes; grid (tiles of outputs, tiles of codes)."""
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(1) * BLOCK_K
    inputs = tl.arange(0, BLOCK_K)[None, :]
    is_output = output < num_outputs
    code_ptrs = codes_ptr + output.to(tl.int64)[:, None] * code_stride + first + inputs
    codes = tl.load(code_ptrs, mask=is_output[:, None], other=0)
    out_ptrs = out_ptr + output.to(tl.int64)[:, None] * num_inputs + first * PER_BYTE + inputs
    for half in tl.static_range(PER_BYTE):
        group = (first * PER_BYTE + half * BLOCK_K) // group_size
        scale, zero = scale_and_zero(
            scale_ptr, zero_ptr, group, output, is_output, num_outputs, KIND
        )
        part = codes if PER_BYTE == 1 else (codes >> (4 * half)) & 15
        weights = decoded(part, zero, tl.float16, KIND).to(tl.float32) * scale[:, None]
        tl.store(
            out_ptrs + half * BLOCK_K, weights.to(out_ptr.dtype.element_ty), mask=is_output[:, None]
        )


def dequantize(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    kind: str,
    group_size: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return the weight [N, K] in `dtype`, rounded once.

    Arguments: as in `kernels.linear.quantized_linear.quantized_linear`, which checks them.
    """
    plan = _plan(codes, kind, group_size)
    out = codes.new_empty((codes.shape[0], codes.shape[1] * PER_BYTE[kind]), dtype=dtype)
    dequantize_kernel[plan.grid](out, codes, scales, zeros, *plan.scalars, **plan.options)
    return out


@planned
def _plan(codes: Tensor, kind: str, group_size: int) -> LaunchPlan:
    num_outputs, columns = codes.shape
    num_inputs = columns * PER_BYTE[kind]
    block_k = block_size(kind, num_inputs, group_size)
    if block_k is None:
        raise ValueError(f"no kernel for {kind} with {num_inputs} inputs in groups of {group_size}")
    return LaunchPlan(
        (triton.cdiv(num_outputs, BLOCK_N), columns // block_k),
        (num_outputs, num_inputs, group_size, stride(codes, 0)),
        {"KIND": kind, "PER_BYTE": PER_BYTE[kind], "BLOCK_N": BLOCK_N, "BLOCK_K": block_k},
    )
