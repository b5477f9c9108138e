"""Linear layers with integer weights of 4 or 8 bits, packed into panels.

A weight is (code - zero) * scale, or (code - zero) * scale - minimum.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.calls import SUFFIXES, Kernel, NoKernelError, function, run, token_stride
from kernels.cpu.linear import Linear, panel_columns
from kernels.cpu.shared_library import load_library

WORD_BYTES = 4
GROUP_STEP = 8
"""Unless a scale covers all inputs of an output, it covers a multiple of this many inputs."""
ROW_GROUP = 128
"""At most this many inputs share a scale of a rounded row (rounded.cpp)."""


class IntegerLinear(Linear):
    """Mirrors `struct IntegerLinear` in integers.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("scales", "zeros", "minimums")),
        *((name, ctypes.c_int64) for name in ("bits", "group", "num_groups")),
    )


@dataclass(frozen=True, slots=True)
class IntegerPanels:
    """A weight [num_columns, depth]. Each column of a panel is an output, as in `fill_panels`."""

    codes: Tensor
    """uint8 [panels, words, panel_columns(), 4]: the codes of four or eight inputs per column."""
    scales: Tensor
    """fp32 [panels, groups, panel_columns()]."""
    zeros: Tensor
    """uint8, like `scales`."""
    bits: int
    group_size: int
    """Inputs that share a scale."""
    num_columns: int
    depth: int
    minimums: Tensor | None = None
    """fp32, like `scales`; None: all are 0."""

    @property
    def nbytes(self) -> int:
        minimums = 0 if self.minimums is None else self.minimums.nbytes
        return self.codes.nbytes + self.scales.nbytes + self.zeros.nbytes + minimums


def to_integer_panels(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor,
    bits: int,
    group_size: int,
    minimums: Tensor | None = None,
) -> IntegerPanels:
    """Pack codes, uint8 [out, in], each below 2**bits.

    scales: fp32 [out, groups], one for each group of group_size inputs; the last group may be
    shorter. zeros: uint8 [out, groups]. minimums: fp32 [out, groups]. Raises ValueError if they do
    not match, or if group_size is neither all inputs nor a multiple of GROUP_STEP.
    """
    (num_columns, depth), groups = codes.shape, (len(codes), -(-codes.shape[1] // group_size))
    if (
        (codes.dtype, scales.dtype, zeros.dtype) != (torch.uint8, torch.float32, torch.uint8)
        or (scales.shape, zeros.shape) != (groups, groups)
        or (minimums is not None and (minimums.dtype, minimums.shape) != (scales.dtype, groups))
        or bits not in (4, 8)
        or (group_size % GROUP_STEP and group_size < depth)
        or (bits == 4 and bool((codes >= 16).any()))
    ):
        raise ValueError(
            f"codes {list(codes.shape)}, scales {list(scales.shape)}, zeros {list(zeros.shape)}, "
            f"{bits} bits and groups of {group_size} do not match, or a dtype is wrong"
        )
    per_word = 8 * WORD_BYTES // bits
    by_word = _by_panel(F.pad(codes, (0, -depth % per_word))).unflatten(1, (-1, per_word))
    words = by_word.transpose(2, 3)
    if bits == 4:
        words = words[..., :WORD_BYTES] | words[..., WORD_BYTES:] << 4
    return IntegerPanels(
        codes=words.contiguous(),
        scales=_by_panel(scales).contiguous(),
        zeros=_by_panel(zeros).contiguous(),
        bits=bits,
        # A group of all inputs is extended to a multiple of ROW_GROUP, so that the groups of
        # rounded rows divide it.
        group_size=group_size if group_size < depth else -(-depth // ROW_GROUP) * ROW_GROUP,
        num_columns=num_columns,
        depth=depth,
        minimums=None if minimums is None else _by_panel(minimums).contiguous(),
    )


def rounds_rows() -> bool:
    """Whether products of integers are faster. Raises LibraryError if there is no library."""
    return hasattr(load_library(), "rounded_fp32")


def integer_linear(
    rows: Tensor, panels: IntegerPanels, bias: Tensor | None = None, *, is_rounded: bool = False
) -> Tensor:
    """Return [..., num_columns] in the dtype of rows [..., depth], fp32 or bf16, summed in fp32.

    is_rounded: first round the rows to 8 bits (VNNI) or 16 (AVX2), with a scale for each row and
    group of inputs. The size of such a group is the greatest common divisor of the weight's group
    size and 64 or 128, or 64 or 128 if a scale of the weight covers all inputs. No number changes
    by more than 1/254 or 1/65534 of the largest magnitude of its group. Rounding needs a CPU for
    which `rounds_rows` is true. A row's result is bitwise independent of the other rows. bias: fp32
    [num_columns]. Raises ValueError for other inputs.
    """
    flat = rows.reshape(-1, rows.shape[-1])
    if flat.stride(-1) != 1:
        flat = flat.contiguous()
    out = rows.new_empty(*rows.shape[:-1], panels.num_columns)
    flat_out = out.view(len(flat), panels.num_columns)
    run(integer_product(flat, panels, bias, flat_out, is_rounded=is_rounded))
    return out


def integer_product(
    rows: Tensor,
    panels: IntegerPanels,
    bias: Tensor | None,
    out: Tensor,
    residual: Tensor | None = None,
    *,
    is_rounded: bool,
) -> Kernel[IntegerLinear]:
    """Return the kernel that computes `integer_linear` for rows [T, depth], whose rows may lie
    apart.

    out, residual: as in `kernels.cpu.linear.product`. Raises NoKernelError for inputs that
    `integer_linear` does not take.
    """
    if (
        rows.shape[-1] != panels.depth
        or out.shape[-1] != panels.num_columns
        or rows.dtype not in SUFFIXES
        or (bias is not None and (bias.shape != (panels.num_columns,) or not bias.is_contiguous()))
        or (bias is not None and bias.dtype != torch.float32)
    ):
        raise NoKernelError(
            f"rows {list(rows.shape)} in {rows.dtype} do not match a weight "
            f"[{panels.num_columns}, {panels.depth}], or the bias does not"
        )
    if is_rounded and not rounds_rows():
        raise NoKernelError("products of integers are not faster here: leave the rows as they are")
    arguments = IntegerLinear(
        out=out.data_ptr(),
        rows=rows.data_ptr(),
        panels=panels.codes.data_ptr(),
        scales=panels.scales.data_ptr(),
        zeros=panels.zeros.data_ptr(),
        minimums=None if panels.minimums is None else panels.minimums.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        residual=None if residual is None else residual.data_ptr(),
        num_tokens=rows.shape[0],
        num_columns=panels.num_columns,
        depth=panels.depth,
        row_stride=rows.stride(0),
        out_stride=token_stride(out, residual),
        scale=1.0,
        bits=panels.bits,
        group=panels.group_size,
        num_groups=panels.scales.shape[1],
    )
    product = function("rounded" if is_rounded else "integers", rows.dtype)
    return Kernel(product, arguments, (rows, panels, bias, out, residual))


def _by_panel(rows: Tensor) -> Tensor:
    """View rows [out, n], padded with zeros, as [panels, n, panel_columns()]."""
    columns = panel_columns()
    padded = F.pad(rows, (0, 0, 0, -len(rows) % columns))
    return padded.unflatten(0, (-1, columns)).transpose(1, 2)
