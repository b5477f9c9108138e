"""RMSNorm and LayerNorm of rows."""

from __future__ import annotations

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from engine.model.elementwise import Elementwise
from engine.model.families import NormKind


class Norm(Protocol):
    def __call__(self, rows: Tensor) -> Tensor:
        """[..., width] → the same shape and type."""
        ...


class RMSNorm:
    """`x / sqrt(mean(x²) + eps) * (weight + offset)` (Zhang and Sennrich, 2019)."""

    def __init__(
        self, weight: Tensor, eps: float, kind: NormKind, elementwise: Elementwise
    ) -> None:
        self.weight, self.eps, self.kind = weight, eps, kind
        self._rms_norm = elementwise.rms_norm
        self._form = {"offset": kind.offset, "rounds_first": kind.rounds_first}

    def __call__(self, rows: Tensor) -> Tensor:
        return self._rms_norm(rows, self.weight, self.eps, **self._form)


class LayerNorm:
    """`(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`.

    weight: [width], or [heads, width] where each head of [T, heads, width] has its own.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        self._weight, self._bias, self._eps = weight, bias, eps

    def __call__(self, rows: Tensor) -> Tensor:
        width = self._weight.shape[-1:]
        if self._weight.ndim == 1:
            return F.layer_norm(rows, width, self._weight, self._bias, self._eps)
        normed = F.layer_norm(rows.float(), width, None, None, self._eps)
        return (normed * self._weight.float()).to(rows.dtype)
