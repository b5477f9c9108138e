"""Linear layers over weights that lie in panels, which is how a product reads them."""

from __future__ import annotations

import ctypes
import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.library import SUFFIXES, LibraryError, function, host_target, load_library

FASTER_ON = ("avx2",)
"""Targets on which it was measured against torch's own product (docs/benchmarks.md)."""


class Linear(ctypes.Structure):
    """The same fields as in linear.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("out", "rows", "panels", "bias")),
        *((name, ctypes.c_int64) for name in ("num_rows", "num_columns", "depth", "row_stride")),
    )


def is_faster() -> bool:
    """Whether this machine is one on which panels pay."""
    try:
        load_library()
        return host_target().name in FASTER_ON
    except LibraryError:
        return False


@functools.cache
def panel_columns() -> int:
    """Columns of a panel: two vectors of the CPU."""
    return load_library().panel_columns()


def to_panels(weight: Tensor) -> Tensor:
    """[out, in] -> [panels, in, panel_columns()]: outputs side by side, the last panel padded."""
    num_columns, depth = weight.shape
    padded = F.pad(weight, (0, 0, 0, -num_columns % panel_columns()))
    return padded.view(-1, panel_columns(), depth).transpose(1, 2).contiguous()


def from_panels(panels: Tensor, num_columns: int) -> Tensor:
    """The weight [num_columns, in] that `to_panels` took."""
    return panels.transpose(1, 2).reshape(-1, panels.shape[1])[:num_columns]


def linear(rows: Tensor, panels: Tensor, num_columns: int, bias: Tensor | None = None) -> Tensor:
    """rows [..., in] -> [..., num_columns], computed in fp32; a row's bits depend on it alone.

    panels: fp32 or bf16. bias: [num_columns]. Rows and bias are both fp32, or both bf16 as panels
    then are, and so is the result. Raises ValueError for others.
    """
    if rows.dtype == torch.bfloat16 and panels.dtype == torch.bfloat16:
        bias = None if bias is None else bias.float()
        return linear(rows.float(), panels, num_columns, bias).bfloat16()
    num_panels, depth, width = panels.shape
    if (
        rows.shape[-1] != depth
        or (width, num_panels) != (panel_columns(), -(-num_columns // width))
        or not panels.is_contiguous()
        or (bias is not None and (bias.shape != (num_columns,) or not bias.is_contiguous()))
        or any(each.dtype != torch.float32 for each in (rows, bias) if each is not None)
        or panels.dtype not in SUFFIXES
    ):
        raise ValueError(
            f"rows {list(rows.shape)}, panels {list(panels.shape)} and {num_columns} columns do "
            "not fit together, or are neither fp32 nor bf16"
        )
    flat = rows.reshape(-1, depth)
    if flat.stride(-1) != 1:
        flat = flat.contiguous()
    out = rows.new_empty(*rows.shape[:-1], num_columns)
    arguments = Linear(
        out=out.data_ptr(),
        rows=flat.data_ptr(),
        panels=panels.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        num_rows=flat.shape[0],
        num_columns=num_columns,
        depth=depth,
        row_stride=flat.stride(0),
    )
    function("linear", panels.dtype)(ctypes.byref(arguments))
    return out
