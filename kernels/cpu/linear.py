"""Linear layers over weights that lie in panels, which is how a product reads them."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.library import SUFFIXES, LibraryError, host_target, load_library

FASTER_ON = ("avx512bf16", "avx512", "avx2")
"""Targets on which it was measured against torch's own product (docs/benchmarks.md)."""


class Linear(ctypes.Structure):
    """The same fields as in linear.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("out", "rows", "panels", "bias", "residual")),
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
    return fill_panels([weight], weight.dtype)


def to_pairs(weight: Tensor) -> Tensor:
    """bf16 [out, in] -> [panels, in / 2, panel_columns(), 2]: two inputs of an output together."""
    return fill_panels([weight], weight.dtype, in_pairs=True)


def fill_panels(parts: Sequence[Tensor], dtype: torch.dtype, *, in_pairs: bool = False) -> Tensor:
    """The panels (or pairs) of a weight whose parts [out_i, in] lie below each other.

    Each part is copied straight to its place where it begins with a panel.
    """
    columns, at_once = panel_columns(), 2 if in_pairs else 1
    if any(len(part) % columns for part in parts[:-1]):
        parts = [torch.cat(list(parts))]
    num_rows, depth = sum(len(part) for part in parts), parts[0].shape[1]
    num_panels = -(-num_rows // columns)
    panels = torch.empty(num_panels, depth // at_once, columns, at_once, dtype=dtype)
    start = 0
    for part in parts:
        whole, rest = divmod(len(part), columns)
        by_panel = part[: whole * columns].reshape(whole, columns, depth // at_once, at_once)
        panels[start : start + whole].copy_(by_panel.transpose(1, 2))
        if rest:
            padded = F.pad(part[-rest:], (0, 0, 0, columns - rest))
            padded = padded.view(columns, depth // at_once, at_once)
            panels[start + whole].copy_(padded.transpose(0, 1))
        start += whole
    return panels if in_pairs else panels.squeeze(-1)


def has_pairs() -> bool:
    """Whether the CPU multiplies pairs of bf16; the library must be there."""
    return hasattr(load_library(), "linear_pairs")


def linear(rows: Tensor, panels: Tensor, num_columns: int, bias: Tensor | None = None) -> Tensor:
    """rows [..., in] -> [..., num_columns], summed in fp32; a row's bits depend on it alone.

    rows: fp32 or, where panels are, bf16; the result is of their type. Products in bf16 are
    computed with panels in pairs, or in fp32. bias: fp32 [num_columns]. Raises ValueError for
    others.
    """
    if panels.dim() == 3 and rows.dtype == panels.dtype == torch.bfloat16:
        return linear(rows.float(), panels, num_columns, bias).bfloat16()
    num_panels, depth, width, at_once = *panels.shape[:3], panels[0, 0, 0].numel()
    if (
        rows.shape[-1] != depth * at_once
        or (width, num_panels) != (panel_columns(), -(-num_columns // width))
        or (rows.dtype == torch.bfloat16) != (at_once == 2)
        or (at_once == 2 and panels.dtype != torch.bfloat16)
        or not panels.is_contiguous()
        or (bias is not None and (bias.shape != (num_columns,) or not bias.is_contiguous()))
        or (bias is not None and bias.dtype != torch.float32)
        or any(each.dtype not in SUFFIXES for each in (rows, panels))
    ):
        raise ValueError(
            f"rows {list(rows.shape)}, panels {list(panels.shape)} and {num_columns} columns do "
            "not fit together, or are neither fp32 nor bf16"
        )
    flat = rows.reshape(-1, rows.shape[-1])
    if flat.stride(-1) != 1 or flat.stride(0) % at_once:
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
        row_stride=flat.stride(0) // at_once,
    )
    product_function(panels)(ctypes.byref(arguments))
    return out


def product_function(panels: Tensor) -> ctypes._NamedFuncPointer:
    """Of the library: takes a `Linear` by reference."""
    name = "linear_pairs" if panels.dim() == 4 else f"linear_{SUFFIXES[panels.dtype]}"
    return getattr(load_library(), name)
