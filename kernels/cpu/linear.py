"""Linear layers with weights packed into panels, in the order in which the kernel reads them."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.calls import SUFFIXES, Calls, Kernel, NoKernelError, token_stride
from kernels.cpu.shared_library import LibraryError, host_target, load_library

FASTER_ON = ("amx", "avx512bf16", "avx512vnni", "avx512", "avxvnni", "avx2")
"""Targets on which this kernel was faster than torch's own matmul (docs/benchmarks.md)."""


class Linear(ctypes.Structure):
    """Mirrors `struct Linear` in linear.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("out", "rows", "panels", "bias", "residual")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_columns", "depth", "row_stride")),
        *((name, ctypes.c_int64) for name in ("out_stride", "activation")),
        ("scale", ctypes.c_float),
    )


def is_faster() -> bool:
    """Whether panels are faster than torch's matmul on this machine."""
    try:
        load_library()
        return host_target().name in FASTER_ON
    except LibraryError:
        return False


@functools.cache
def panel_columns() -> int:
    """Return the number of columns of a panel: two vectors of the CPU."""
    return load_library().panel_columns()


def fill_panels(parts: Sequence[Tensor], dtype: torch.dtype, *, in_pairs: bool = False) -> Tensor:
    """Concatenate the parts [out_i, in] of a weight and pack them into panels, or panels of pairs.

    Panels are [panels, in, panel_columns()], and panels of pairs, which are for bf16, are
    [panels, in / 2, panel_columns(), 2]. Each column is an output, and the last panel is padded.
    If all parts begin at panel boundaries, they are copied only once, into the panels.
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
    """Whether the CPU can multiply bf16 pairs. Raises LibraryError if there is no library."""
    return hasattr(load_library(), "linear_pairs")


def linear(rows: Tensor, panels: Tensor, num_columns: int, bias: Tensor | None = None) -> Tensor:
    """Return [..., num_columns] in the dtype of rows [..., in], summed in fp32.

    A row's result is bitwise independent of the other rows. rows: fp32, or bf16 if the panels are
    bf16. Panels of pairs take only bf16 rows; other panels multiply bf16 rows in fp32. bias: fp32
    [num_columns]. Raises ValueError for other inputs.
    """
    return Product(panels, num_columns)(rows, bias)


class Product:
    """`linear` for one weight. One thread at a time may call it."""

    def __init__(self, panels: Tensor, num_columns: int) -> None:
        self._panels, self._num_columns = panels, num_columns
        self._at_once = panels.shape[3] if panels.dim() == 4 else 1
        self._checked: tuple[torch.dtype, int] | None = None
        """Dtype and width of the rows that the kernel was made for, with `_bias`."""
        self._bias: Tensor | None = None

    def __call__(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        flat = rows.reshape(-1, rows.shape[-1])
        if flat.stride(-1) != 1 or flat.stride(0) % 2:
            flat = flat.contiguous()
        out = rows.new_empty(*rows.shape[:-1], self._num_columns)
        if self._checked != (rows.dtype, rows.shape[-1]) or bias is not self._bias:
            self._prepare(flat, bias, out.view(len(flat), self._num_columns))
        arguments = self._arguments
        arguments.rows, arguments.out = flat.data_ptr(), out.data_ptr()
        arguments.num_tokens = flat.shape[0]
        arguments.row_stride = flat.stride(0) // self._at_once
        self._run()
        return out

    def _prepare(self, rows: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """Check the weight, the bias and such rows, and make their kernel."""
        kernel = product(rows, self._panels, self._num_columns, bias, out)
        self._arguments = kernel.arguments
        self._run = Calls([kernel._replace(kept=(self._panels, bias))])  # frees rows and out
        self._checked, self._bias = (rows.dtype, rows.shape[-1]), bias


def product(
    rows: Tensor,
    panels: Tensor,
    num_columns: int,
    bias: Tensor | None,
    out: Tensor,
    residual: Tensor | None = None,
) -> Kernel[Linear]:
    """Return the kernel that computes `linear` for rows [T, in], whose rows may lie apart.

    out: num_columns for each row; rows may lie apart. residual: like `out`, and may be the same
    tensor; the rounded product is added to it. Raises NoKernelError for inputs that `linear` does
    not take.
    """
    num_panels, depth, width = panels.shape[:3]
    at_once = panels.shape[3] if panels.dim() == 4 else 1
    if (
        rows.shape[-1] != depth * at_once
        or out.shape[-1] != num_columns
        or (width, num_panels) != (panel_columns(), -(-num_columns // width))
        or (at_once == 2 and rows.dtype != torch.bfloat16)
        or (rows.dtype == torch.bfloat16 and panels.dtype != torch.bfloat16)
        or not panels.is_contiguous()
        or (bias is not None and (bias.shape != (num_columns,) or not bias.is_contiguous()))
        or (bias is not None and bias.dtype != torch.float32)
        or any(tensor.dtype not in SUFFIXES for tensor in (rows, panels))
    ):
        raise NoKernelError(
            f"rows {list(rows.shape)}, panels {list(panels.shape)} and {num_columns} columns do "
            "not match, or are neither fp32 nor bf16"
        )
    arguments = Linear(
        out=out.data_ptr(),
        rows=rows.data_ptr(),
        panels=panels.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        residual=None if residual is None else residual.data_ptr(),
        num_tokens=rows.shape[0],
        num_columns=num_columns,
        depth=depth,
        row_stride=rows.stride(0) // at_once,
        out_stride=token_stride(out, residual),
        scale=1.0,
    )
    name = "pairs" if at_once == 2 else SUFFIXES[panels.dtype]
    if at_once == 1 and rows.dtype == torch.bfloat16:
        name = "widened"
    function = getattr(load_library(), f"linear_{name}")
    return Kernel(function, arguments, (rows, panels, bias, out, residual))
