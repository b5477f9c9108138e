"""`Integers`: a weight of 4 or 8 bits in panels for the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.model.linear import Format
from engine.model.quantization.weights import IntegerWeight, OffsetWeight
from kernels.cpu.calls import Kernel
from kernels.cpu.integers import (
    GROUP_STEP,
    IntegerPanels,
    integer_linear,
    integer_product,
    rounds_rows,
    to_integer_panels,
)


class Integers(Format):
    """A format for the C++ kernels of `kernels.cpu.integers`.

    With `is_rounded`, rows are rounded to 8 or 16 bits (docs/quantization.md). This changes a
    product of normally distributed rows by 0.6 % or 0.003 % of its root mean square. Without it, a
    product is computed in fp32 with the values of `IntegerWeight.dequantized`.
    """

    def __init__(self, panels: IntegerPanels, *, is_rounded: bool) -> None:
        self.panels, self.is_rounded = panels, is_rounded
        self.num_bytes = panels.nbytes

    @staticmethod
    def supports(weight: IntegerWeight | OffsetWeight) -> bool:
        """Whether the kernels take groups of this size."""
        return weight.group_size % GROUP_STEP == 0 or weight.group_size == weight.shape[1]

    @classmethod
    def of(cls, weight: IntegerWeight | OffsetWeight, *, is_exact: bool = False) -> Integers:
        """Pack a weight. Rows are rounded where that is faster, unless `is_exact`.

        Raises ValueError if `supports` is false.
        """
        if isinstance(weight, OffsetWeight):
            zeros, minimums = torch.zeros_like(weight.scales, dtype=torch.uint8), weight.minimums
        else:
            zeros, minimums = weight.zeros, None
        panels = to_integer_panels(
            weight.codes, weight.scales, zeros, weight.bits, weight.group_size, minimums
        )
        return cls(panels, is_rounded=rounds_rows() and not is_exact)

    def multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        return integer_linear(rows, self.panels, bias, is_rounded=self.is_rounded)

    def kernel(
        self, rows: Tensor, bias: Tensor | None, out: Tensor, residual: Tensor | None
    ) -> Kernel[Any]:
        return integer_product(rows, self.panels, bias, out, residual, is_rounded=self.is_rounded)
