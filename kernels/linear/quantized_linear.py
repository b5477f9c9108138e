"""A linear layer with int4, int8, fp8 or MXFP4 weights and 16-bit rows.

Codes become numbers of the rows' type in registers. That is exact: an integer minus its zero has at
most 8 significant bits, e4m3 has 4 and e2m1 has 2. The scale of a group multiplies the group's sum
of products in fp32. So weights are read in their stored size, and only the result is rounded.

Tiles are computed as codes times rows, and not as rows times codes. So the codes are the operand
that a tensor core reads from registers, and never pass through shared memory as numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import cuda_capability_geq

from kernels.arguments import stride
from kernels.fp8 import e4m3_decode
from kernels.launch_plan import LaunchPlan, planned
from kernels.linear.fp4 import e2m1_decode, e8m0_decode
from kernels.linear.grouped_linear import GROUP
from kernels.linear.pinned_linear import tile_place

DTYPES = (torch.bfloat16, torch.float16)
PER_BYTE: Mapping[str, int] = {"int4": 2, "int8": 1, "fp8": 1, "fp4": 2}
"""Codes in a byte, by kind of weight. fp8 is e4m3; fp4 is MXFP4."""
TILES: Mapping[tuple[int, int], tuple[int, int, int]] = {
    (16, 32): (32, 2, 4),
    (16, 64): (128, 4, 3),
    (32, 32): (64, 4, 3),
    (32, 64): (64, 4, 4),
    (64, 32): (64, 4, 3),
    (64, 64): (64, 4, 4),
}
"""Maps the rows and inputs of a tile to its outputs, and to the kernel's warps and stages.

With these sizes, loops need no stack and read 16 bytes at a time on sm_80 to sm_90, as
tests/kernels/compiled/test_quantized_compile.py checks.
"""
WARPS = 2048
"""Warps that hide each other's waits: sixteen on each multiprocessor of an H200."""
MIN_STEPS = 4
"""Steps of the loop over inputs for which a split is worth its partial sums."""
ADDED = 256
"""Outputs of which a program adds the splits."""
SPLITS_AT_ONCE = 8
"""Splits that it reads at once."""


@triton.jit
def scale_and_zero(
    scale_ptr, zero_ptr, group, output, is_output, num_outputs, KIND: tl.constexpr
):
    """Load the scales and zeros [N] of one group. For fp8 and fp4, there are no zeros."""
    place = group * num_outputs + output
    scale = tl.load(scale_ptr + place, mask=is_output, other=0)
    zero = scale
    if KIND == "fp4":
        scale = e8m0_decode(scale)
    elif KIND != "fp8":
        zero = tl.load(zero_ptr + place, mask=is_output, other=0)
    return scale, zero


@triton.jit
def difference(bits, zero, dtype: tl.constexpr):
    """Return the numbers of type dtype that have these bits [N, K], minus zeros [N]."""
    return bits.to(dtype, bitcast=True) - zero.to(dtype)[:, None]


@triton.jit
def decoded(codes, zero, dtype: tl.constexpr, KIND: tl.constexpr):
    """Return codes [N, K] as numbers, exactly, without their scale.

    NOTE: the two NaN codes of fp8 become NaN on sm_89 and newer, and ±480 before.
    """
    if KIND == "fp8":
        if cuda_capability_geq(8, 9):
            numbers = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(dtype)
        else:
            numbers = e4m3_decode(codes, dtype)
    elif KIND == "fp4":
        numbers = e2m1_decode(codes, dtype)
    # In the lowest mantissa bits of 2 ** 10 in fp16, 2 ** 7 in bf16 or 2 ** 23 in fp32, an integer
    # is added to that power. This takes fewer instructions than a conversion of the integer.
    elif dtype == tl.float16:
        numbers = difference(codes.to(tl.int16) | 0x6400, zero.to(tl.int16) + 2**10, dtype)
    elif KIND == "int4":
        numbers = difference(codes.to(tl.int16) | 0x4300, zero.to(tl.int16) + 2**7, dtype)
    else:
        bits = codes.to(tl.int32) | 0x4B000000
        numbers = difference(bits, zero.to(tl.int32) + 2**23, tl.float32).to(dtype)
    return numbers


@triton.jit
def partial_sums(sums, rows, codes, scale, zero, KIND: tl.constexpr):
    """Add to sums [N, M] the products of codes [N, K] and rows [M, K], all of one group."""
    return sums + tl.dot(decoded(codes, zero, rows.dtype, KIND), rows.T) * scale[:, None]


@triton.jit
def quantized_tile(
    rows_ptr, codes_ptr, scale_ptr, zero_ptr, row, is_row, output, is_output,
    num_outputs, begin, end, group_size, row_stride, code_stride,
    KIND: tl.constexpr, PER_BYTE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """Return the products [BLOCK_M, BLOCK_N] in fp32 of these rows and outputs of one weight, over
    the inputs from `begin` to `end`.

    BLOCK_K divides group_size, and PER_BYTE times BLOCK_K divides `begin` and `end`.
    """
    inputs = tl.arange(0, BLOCK_K)[None, :]
    row_ptrs = rows_ptr + row.to(tl.int64)[:, None] * row_stride + inputs
    code_ptrs = codes_ptr + output.to(tl.int64)[:, None] * code_stride + inputs
    is_row, is_code = is_row[:, None], is_output[:, None]
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    # The compiler loads only the operands of tl.dot ahead. So scales are loaded an iteration early.
    scale, zero = scale_and_zero(
        scale_ptr, zero_ptr, begin // group_size, output, is_output, num_outputs, KIND
    )
    for first in range(begin, end, BLOCK_K * PER_BYTE):
        rows = tl.load(row_ptrs + first, mask=is_row, other=0.0)
        codes = tl.load(code_ptrs + first // PER_BYTE, mask=is_code, other=0)
        place = first + BLOCK_K
        next_scale, next_zero = scale_and_zero(
            scale_ptr, zero_ptr, place // group_size, output, is_output & (place < end),
            num_outputs, KIND,
        )
        if PER_BYTE == 2:  # the second half of the inputs is in the upper halves of the bytes
            sums = partial_sums(sums, rows, codes & 15, scale, zero, KIND)
            rows = tl.load(row_ptrs + place, mask=is_row, other=0.0)
            codes >>= 4
            scale, zero = next_scale, next_zero
            place += BLOCK_K
            next_scale, next_zero = scale_and_zero(
                scale_ptr, zero_ptr, place // group_size, output, is_output & (place < end),
                num_outputs, KIND,
            )
        sums = partial_sums(sums, rows, codes, scale, zero, KIND)
        scale, zero = next_scale, next_zero
    return sums.T


@triton.jit(do_not_specialize=["num_rows"])
def quantized_linear_kernel(
    out_ptr, partial_ptr, rows_ptr, codes_ptr, scale_ptr, zero_ptr, bias_ptr,
    num_rows, num_outputs, num_inputs, group_size, row_stride, code_stride, split_size,
    HAS_BIAS: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, PER_BYTE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """Compute one output tile over split_size of the inputs; grid (row tiles * output tiles,
    splits). If there are several splits, their sums go to partial_ptr, [splits, M, N] fp32."""
    row, is_row, output, is_output = tile_place(num_rows, num_outputs, GROUP, BLOCK_M, BLOCK_N)
    begin = tl.program_id(1) * split_size
    sums = quantized_tile(
        rows_ptr, codes_ptr, scale_ptr, zero_ptr, row, is_row, output, is_output,
        num_outputs, begin, tl.minimum(begin + split_size, num_inputs), group_size, row_stride,
        code_stride, KIND, PER_BYTE, BLOCK_M, BLOCK_N, BLOCK_K,
    )
    place = row.to(tl.int64)[:, None] * num_outputs + output[None, :]
    is_inside = is_row[:, None] & is_output[None, :]
    if partial_ptr is not None:
        first = tl.program_id(1) * num_rows * num_outputs
        tl.store(partial_ptr + first + place, sums, mask=is_inside)
    else:
        if HAS_BIAS:
            sums += tl.load(bias_ptr + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
        tl.store(out_ptr + place, sums.to(out_ptr.dtype.element_ty), mask=is_inside)


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def add_splits_kernel(
    out_ptr, partial_ptr, bias_ptr, num_rows, num_outputs, num_splits,
    HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr, AT_ONCE: tl.constexpr,
):
    """Add the splits of BLOCK_N outputs of one row, in order; grid (rows, tiles of outputs)."""
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = output < num_outputs
    place = tl.program_id(0).to(tl.int64) * num_outputs + output
    sums = tl.zeros((BLOCK_N,), tl.float32)
    for first in range(0, num_splits, AT_ONCE):
        for index in tl.static_range(AT_ONCE):  # these loads do not wait for each other
            split = first + index
            partial_ptrs = partial_ptr + split * num_rows * num_outputs + place
            sums += tl.load(partial_ptrs, mask=is_output & (split < num_splits), other=0.0)
    if HAS_BIAS:
        sums += tl.load(bias_ptr + output, mask=is_output, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, sums.to(out_ptr.dtype.element_ty), mask=is_output)


def pack_pairs(codes: Tensor, group_size: int) -> Tensor:
    """Pack codes [N, K] uint8, each 0 to 15, into bytes [N, K / 2] as the kernels read them.

    A byte holds two inputs that are `block_size` apart, the earlier input in its lower half. Raises
    ValueError if `block_size` returns None.
    """
    block = block_size("int4", codes.shape[1], group_size)
    if block is None:
        raise ValueError(f"no kernel for 4-bit codes {list(codes.shape)}, groups of {group_size}")
    low, high = codes.unflatten(1, (-1, 2, block)).unbind(2)
    return (low | high << 4).flatten(1)


def block_size(kind: str, num_inputs: int, group_size: int) -> int | None:
    """Return how many inputs a block has: 64, 32, or None if neither fits.

    kind: a key of PER_BYTE. A block lies in one group. The kernels take one block at a time, or two
    blocks if a byte has two codes.
    """
    if num_inputs % group_size:
        return None
    for size in (64, 32):
        if group_size % size == num_inputs % (PER_BYTE[kind] * size) == 0:
            return size
    return None


def quantized_linear(
    rows: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    kind: str,
    group_size: int,
    *,
    is_pinned: bool = False,
) -> Tensor:
    """Return `rows @ weight.T + bias`, [M, N] of the rows' type, summed in fp32.

    rows: [M, K] in fp16 or bf16, K contiguous. kind: a key of PER_BYTE. codes: uint8, [N, K]; if a
    byte has two codes, [N, K / 2] from `pack_pairs`. scales: fp32 [groups, N]; for fp4, uint8
    exponents with a bias of 127. zeros: uint8 [groups, N] for integers, otherwise None. bias: [N],
    fp32 or of the rows' type. All tensors but the rows are contiguous. is_pinned: the bits of a row
    do not depend on M. Raises ValueError for other shapes, strides and types, and for groups for
    which `block_size` returns None.
    """
    plan = _plan(rows, codes, scales, zeros, bias, kind, group_size, is_pinned)
    out = rows.new_empty((rows.shape[0], codes.shape[0]))
    if not plan.grid[0]:
        return out
    num_splits, partial = plan.grid[1], None
    if num_splits > 1:
        partial = out.new_empty((num_splits, *out.shape), dtype=torch.float32)
    quantized_linear_kernel[plan.grid](
        out, partial, rows, codes, scales, zeros, bias, *plan.scalars, **plan.options
    )
    if partial is not None:
        add_splits_kernel[out.shape[0], triton.cdiv(out.shape[1], ADDED)](
            out, partial, bias, *out.shape, num_splits,
            HAS_BIAS=bias is not None, BLOCK_N=ADDED, AT_ONCE=SPLITS_AT_ONCE,
        )
    return out


@planned
def _plan(
    rows: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None,
    kind: str, group_size: int, is_pinned: bool,
) -> LaunchPlan:
    if (rows.ndim, codes.ndim) != (2, 2):
        raise ValueError(
            f"rows {list(rows.shape)} and codes {list(codes.shape)}; they must be [M, K] and "
            "[N, columns]"
        )
    (num_rows, num_inputs), num_outputs = rows.shape, codes.shape[0]
    options = tile_options(num_rows, num_inputs, kind, group_size, is_pinned)
    check_codes(rows, codes, scales, zeros, kind, group_size)
    if bias is not None:
        _check_bias(bias, num_outputs, rows.dtype)
    num_tiles = triton.cdiv(num_rows, options["BLOCK_M"]) * triton.cdiv(
        num_outputs, options["BLOCK_N"]
    )
    step = options["BLOCK_K"] * PER_BYTE[kind]
    num_warps = num_tiles * options["num_warps"]
    split_size = num_inputs if is_pinned else _split_size(num_warps, num_inputs, step)
    strides = (stride(rows, 0), stride(codes, 0))
    return LaunchPlan(
        (num_tiles, triton.cdiv(num_inputs, split_size)),
        (num_rows, num_outputs, num_inputs, group_size, *strides, split_size),
        {"HAS_BIAS": bias is not None, **options},
    )


def _split_size(num_warps: int, num_inputs: int, step: int) -> int:
    """Return the inputs of a split, a multiple of `step`, so that warps fill the GPU.

    num_warps: those of all tiles, if nothing is split.
    """
    num_steps = num_inputs // step
    num_splits = max(1, min(num_steps // MIN_STEPS, WARPS // max(1, num_warps)))
    return -(-num_steps // num_splits) * step


def tile_options(
    num_rows: int, num_inputs: int, kind: str, group_size: int, is_pinned: bool
) -> dict[str, Any]:
    """Return the constants and options of a kernel for `num_rows` rows of a weight.

    is_pinned: they are those for many rows. Raises ValueError if `block_size` returns None.
    """
    block_k = block_size(kind, num_inputs, group_size)
    if block_k is None:
        raise ValueError(f"no kernel for {kind} with {num_inputs} inputs in groups of {group_size}")
    block_m = 64 if is_pinned else min(max(16, triton.next_power_of_2(num_rows)), 64)
    block_n, num_warps, num_stages = TILES[block_m, block_k]
    return {
        "GROUP": GROUP,
        "KIND": kind,
        "PER_BYTE": PER_BYTE[kind],
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "num_warps": num_warps,
        "num_stages": num_stages,
    }


def check_codes(
    rows: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, kind: str, group_size: int
) -> None:
    """Raise ValueError unless the rows and a quantized weight fit together, as `quantized_linear`
    says. Codes, scales and zeros may have leading dimensions, such as the experts."""
    *leading, num_outputs, _ = codes.shape
    num_inputs = rows.shape[1]
    columns = num_inputs // PER_BYTE[kind]
    groups = (*leading, num_inputs // group_size, num_outputs)
    if codes.shape[-1] != columns or scales.shape != groups:
        raise ValueError(
            f"codes {list(codes.shape)} and scales {list(scales.shape)} do not fit rows "
            f"{list(rows.shape)} and groups of {group_size}"
        )
    got = None if zeros is None else (tuple(zeros.shape), zeros.dtype)
    if got != ((groups, torch.uint8) if kind.startswith("int") else None):
        raise ValueError(
            f"zeros must have the shape of scales, {list(groups)}, and be uint8 for int4 and int8; "
            f"they must be None for fp8 and fp4; got {got}"
        )
    scale_dtype = torch.uint8 if kind == "fp4" else torch.float32
    if rows.dtype not in DTYPES or codes.dtype != torch.uint8 or scales.dtype != scale_dtype:
        raise ValueError(
            f"rows are {rows.dtype}, codes {codes.dtype} and scales {scales.dtype}; they must be "
            f"fp16 or bf16, uint8 and {scale_dtype}"
        )
    others = [tensor for tensor in (codes, scales, zeros) if tensor is not None]
    if rows.stride(-1) != 1 or not all(tensor.is_contiguous() for tensor in others):
        raise ValueError(
            "codes, scales and zeros must be contiguous, and rows in their last dimension"
        )


def _check_bias(bias: Tensor, num_outputs: int, dtype: torch.dtype) -> None:
    if bias.shape != (num_outputs,) or bias.dtype not in (dtype, torch.float32):
        raise ValueError(
            f"bias is {list(bias.shape)} {bias.dtype}; it must be [{num_outputs}], fp32 or {dtype}"
        )
    if not bias.is_contiguous():
        raise ValueError("bias must be contiguous")
