"""Loads the layers of a decoder in formats whose kernels do not depend on the number of rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from engine.model.families import NormKind
from engine.model.linear import Dense, Format, Quantized, Stored
from engine.model.norms import Norm
from engine.model.quantization.formats import (
    Dequantizing,
    PermutedInputs,
    SideBySide,
    TritonCodes,
)
from engine.model.quantization.schemes import QuantizingLoader
from kernels.linear.pinned_linear import pinned_linear


class PinnedDense(Dense):
    """A plain [out, in] tensor on CUDA, multiplied by our kernel instead of cuBLAS."""

    def multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        return pinned_linear(rows, self.weight, bias)


class PinnedDequantizing(Dequantizing):
    """Dequantizes a weight that has no kernel, and multiplies by it as `PinnedDense` does."""

    def __init__(self, weight: Quantized) -> None:
        super().__init__(weight)

    def multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        bias = None if bias is None else bias.to(rows.dtype)
        return pinned_linear(rows, self.weight.dequantized().to(rows.dtype), bias)


class PinnedLoader(QuantizingLoader):
    """A loader for CUDA. Rows are multiplied as they are: torch's FP8 product is not used.

    Quantized experts and `choose_grouped` read `is_pinned`.
    """

    is_pinned = True

    def format(self, parts: Sequence[Stored], dtype: torch.dtype | None = None) -> Format:
        return pinned(super().format(parts, dtype))

    def split_norm(
        self,
        name: str,
        width: int,
        columns: range,
        num_holders: int,
        kind: NormKind,
        eps: float,
        num_groups: int = 1,
    ) -> Norm:
        # The order of torch's sums of squares depends on the number of rows.
        self.group.require_one(f"option.batch_invariant with {name}, a norm of whole rows,")
        return super().split_norm(name, width, columns, num_holders, kind, eps, num_groups)

    def _tied_head(self, embedding: Tensor) -> Format:
        return pinned(super()._tied_head(embedding))


def pinned(format: Format) -> Format:
    """Return the weight in a format whose bits for a row do not depend on the other rows."""
    if isinstance(format, Dense):
        return PinnedDense(format.weight)
    if isinstance(format, Dequantizing):
        return PinnedDequantizing(format.weight)
    if isinstance(format, PermutedInputs):
        return PermutedInputs(pinned(format.format), format.order)
    if isinstance(format, SideBySide):
        return SideBySide([pinned(part) for part in format.formats], format.sizes)
    assert isinstance(format, TritonCodes), f"{type(format).__name__} is not for CUDA"
    format.product = partial(format.product, is_pinned=True)
    format.max_rows = float("inf")
    return format
