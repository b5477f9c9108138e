"""`Linear`, and the formats in which its weight may be stored.

A format says how a checkpoint's tensors become it, how it multiplies rows, and what it takes. To
add one, write such a class and choose it in `choose_format`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu import linear as cpu_linear
from kernels.cpu.library import SUFFIXES

Add = Callable[[Tensor, Tensor], None]
"""(rows [T, in], outputs [T, out]): adds to the outputs in place."""


class Format(Protocol):
    """A weight [out, in]."""

    num_bytes: int

    def multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """rows [T, in] → [T, out], of the same type. bias: [out], in fp32 or the rows' type."""
        ...


MakeFormat = Callable[[Sequence[Tensor]], Format]
"""Makes one weight of parts, [out_i, in] each, below each other. The parts may lie in files."""


class Dense:
    """As it is, on any device."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.num_bytes = weight.nbytes

    @classmethod
    def of(cls, parts: Sequence[Tensor], device: torch.device, dtype: torch.dtype) -> Dense:
        """Copies each part straight to its place."""
        num_rows = sum(len(part) for part in parts)
        weight = torch.empty(num_rows, parts[0].shape[1], device=device, dtype=dtype)
        start = 0
        for part in parts:
            weight[start : start + len(part)].copy_(part)
            start += len(part)
        return cls(weight)

    def multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(rows, self.weight, bias)


class Panels:
    """In panels, as the C++ product of a CPU reads it; see `kernels.cpu.linear`.

    A weight that bf16 holds to the bit stays bf16 beside rows of fp32: half the memory to read, and
    the same numbers. Rows of bf16 have theirs in pairs on CPUs that multiply those.
    """

    def __init__(self, panels: Tensor, num_columns: int) -> None:
        self.panels, self.num_columns = panels, num_columns
        self.num_bytes = panels.nbytes

    @classmethod
    def of(cls, parts: Sequence[Tensor], dtype: torch.dtype) -> Panels:
        """dtype: of rows, fp32 or bf16."""
        stored = torch.bfloat16 if all(map(_fits_bf16, parts)) else dtype
        in_pairs = dtype == torch.bfloat16 and parts[0].shape[1] % 2 == 0 and cpu_linear.has_pairs()
        panels = cpu_linear.fill_panels(parts, stored, in_pairs=in_pairs)
        return cls(panels, sum(len(part) for part in parts))

    def multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        return cpu_linear.linear(rows, self.panels, self.num_columns, bias)


def choose_format(device: torch.device, dtype: torch.dtype) -> MakeFormat:
    """The fastest for the device."""
    if uses_panels(device, dtype):
        return lambda parts: Panels.of(parts, dtype)
    return lambda parts: Dense.of(parts, device, dtype)


def uses_panels(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cpu" and dtype in SUFFIXES and cpu_linear.is_faster()


@dataclass(frozen=True, slots=True)
class Part:
    """One of the checkpoint's layers within a merged one."""

    rows: slice
    """Which outputs are its."""
    order: Tensor | None = None
    """[out] int64: the checkpoint's row that each output is; None: as they are."""


class Linear:
    """rows [T, in] → [T, out]: the one place that knows how a weight is stored.

    Layers of the same input (q, k and v; gate and up) are one `Linear`, and `parts` says which
    outputs are whose. Adapters add to what it returns.
    """

    def __init__(
        self,
        format: Format,
        bias: Tensor | None,
        parts: Mapping[str, Part],
        in_features: int,
        dtype: torch.dtype,
    ) -> None:
        """bias: [out]. parts: by the names of the checkpoint. dtype: of rows."""
        self.format = format
        self.bias = bias
        self.parts = parts
        self.in_features = in_features
        self.dtype = dtype
        self._add: Add | None = None

    def __call__(self, rows: Tensor) -> Tensor:
        outputs = self.format.multiply(rows, self.bias)
        if self._add is not None:
            self._add(rows, outputs)
        return outputs

    def attach(self, add: Add) -> None:
        """From now on `add` is called with each product; for adapters."""
        self._add = add


def _fits_bf16(part: Tensor) -> bool:
    """Whether bf16 holds every number to the bit; a few rows at a time, to take little memory."""
    return part.dtype == torch.bfloat16 or all(
        torch.equal(rows.bfloat16().to(rows.dtype), rows) for rows in part.split(1024)
    )
