"""Formats of `Linear` for quantized weights.

`make_format` chooses one. To add a kernel, write a format and choose it in `_quantized`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.integers import Integers
from engine.model.linear import Format, choose_format, uses_panels
from engine.model.quantized import (
    IntegerWeight,
    PermutedWeight,
    Quantized,
    Stored,
    joined,
    num_bytes,
)


class Dequantizing:
    """Dequantizes the weight for each product: slow, exact, for every device.

    The reference of the kernels, and the format where there is none.
    """

    def __init__(self, weight: Quantized) -> None:
        self.weight = weight
        self.num_bytes = num_bytes(weight)

    def multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        weight = self.weight.dequantized().to(rows.dtype)
        return F.linear(rows, weight, None if bias is None else bias.to(rows.dtype))


class PermutedInputs:
    """A format whose weight has its columns in another order than the inputs."""

    def __init__(self, format: Format, order: Tensor) -> None:
        """order: [in] int64, the input of each column."""
        self._format, self._order = format, order
        self.num_bytes = format.num_bytes + order.nbytes

    def multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        return self._format.multiply(rows.index_select(1, self._order), bias)


class SideBySide:
    """Layers with the same input that cannot be stored as one weight."""

    def __init__(self, formats: Sequence[Format], sizes: Sequence[int]) -> None:
        """sizes: the outputs of each format."""
        self._formats, self._sizes = formats, sizes
        self.num_bytes = sum(format.num_bytes for format in formats)

    def multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        biases = [None] * len(self._sizes) if bias is None else bias.split_with_sizes(self._sizes)
        products = [
            format.multiply(rows, part) for format, part in zip(self._formats, biases, strict=True)
        ]
        return torch.cat(products, 1)


def make_format(
    parts: Sequence[Stored], device: torch.device, dtype: torch.dtype, *, is_exact: bool = False
) -> Format:
    """Concatenate parts [out_i, in] into one weight, in the fastest format for the device.

    dtype: dtype of the rows. is_exact: rows are not to be rounded further for a product.
    """
    dense = [part for part in parts if isinstance(part, Tensor)]
    if len(dense) == len(parts):
        return choose_format(device, dtype)(dense)
    if dense:
        formats = [make_format([part], device, dtype, is_exact=is_exact) for part in parts]
        return SideBySide(formats, [part.shape[0] for part in parts])
    weights = joined([part for part in parts if not isinstance(part, Tensor)], device)
    if len(weights) == 1:
        return _quantized(weights[0], device, dtype, is_exact)
    formats = [_quantized(weight, device, dtype, is_exact) for weight in weights]
    return SideBySide(formats, [weight.shape[0] for weight in weights])


def _quantized(
    weight: Quantized, device: torch.device, dtype: torch.dtype, is_exact: bool
) -> Format:
    """Return the fastest format of a weight that is on its device."""
    if isinstance(weight, PermutedWeight):
        return PermutedInputs(_quantized(weight.weight, device, dtype, is_exact), weight.order)
    if (
        isinstance(weight, IntegerWeight)
        and uses_panels(device, dtype)
        and Integers.supports(weight)
    ):
        return Integers.of(weight, is_exact=is_exact)
    return Dequantizing(weight)
