"""RMSNorm and LayerNorm."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.elementwise import Elementwise
from engine.model.families import NormKind
from kernels.cpu import elementwise as cpu_elementwise
from kernels.cpu.calls import NoKernelError
from kernels.cpu.step_calls import StepCalls

MeanSquare = Callable[[Tensor], Tensor]
"""Takes this process's sum of squares of each row, [T, 1] fp32. Returns the mean square of the
whole row, [T, 1]."""


class Norm(ABC):
    @abstractmethod
    def __call__(self, rows: Tensor) -> Tensor:
        """Normalize rows [..., width]; the result has their shape and dtype."""

    def prepare(
        self, calls: StepCalls, rows: Tensor, out: Tensor, residual: Tensor | None = None
    ) -> Tensor:
        """Have `calls` write the norm of rows [T, ..., width] to `out`, and return `out`.

        residual: like `out`, and may be `out` itself; the norm is added to it. Raises
        NoKernelError.
        """
        raise NoKernelError(f"a {type(self).__name__} has no kernel")

    def after_add(self, hidden: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
        """Return `hidden + output` and the norm of this sum, [T, width] each."""
        hidden = hidden + output
        return hidden, self(hidden)


def add_and_norm(
    hidden: Tensor, output: Tensor | None, norm: Norm | None, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return `hidden + scale * output` and its norm, in one launch if there is a kernel for it.

    hidden, output: [T, width]. output=None: nothing is added. norm=None: the sum is returned twice.
    """
    if output is not None:
        if norm is not None and scale == 1.0:
            return norm.after_add(hidden, output)
        hidden = torch.add(hidden, output, alpha=scale)
    return hidden, hidden if norm is None else norm(hidden)


class RMSNorm(Norm):
    """`x / sqrt(mean(x²) + eps) * (weight + offset)` (Zhang and Sennrich, 2019)."""

    def __init__(
        self, weight: Tensor, eps: float, kind: NormKind, elementwise: Elementwise
    ) -> None:
        """weight: [width]. If `elementwise.norms_all_heads`, it may also be [heads, width]."""
        self.weight, self.eps, self.kind, self.elementwise = weight, eps, kind, elementwise
        self._rms_norm, self._add_rms_norm = elementwise.rms_norm, elementwise.add_rms_norm
        self._options = {"offset": kind.offset, "rounds_first": kind.rounds_first}

    def __call__(self, rows: Tensor) -> Tensor:
        return self._rms_norm(rows, self.weight, self.eps, **self._options)

    def prepare(
        self, calls: StepCalls, rows: Tensor, out: Tensor, residual: Tensor | None = None
    ) -> Tensor:
        kernel = cpu_elementwise.norm(rows, self.weight, self.eps, out, residual, **self._options)
        calls.add(kernel)
        return out

    def after_add(self, hidden: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
        return self._add_rms_norm(hidden, output, self.weight, self.eps, **self._options)


def norm_of_all_heads(norms: Sequence[Norm], num_heads: Sequence[int]) -> RMSNorm | None:
    """Merge norms into one that normalizes rows [T, heads, width] in one launch.

    Each head is normalized with the weight of its own norm. num_heads: the number of successive
    heads of each norm. Returns None if there is no kernel for these norms.
    """
    first = norms[0]
    if not isinstance(first, RMSNorm) or not first.elementwise.norms_all_heads:
        return None
    weights: list[Tensor] = []
    for norm, count in zip(norms, num_heads, strict=True):
        if not isinstance(norm, RMSNorm) or (norm.eps, norm.kind) != (first.eps, first.kind):
            return None
        weights.append(norm.weight.expand(count, -1))
    return RMSNorm(torch.cat(weights), first.eps, first.kind, first.elementwise)


class SplitRMSNorm(Norm):
    """An RMSNorm of rows that are split over processes; this one has [T, share]."""

    def __init__(self, weight: Tensor, eps: float, kind: NormKind, mean_square: MeanSquare) -> None:
        """weight: [share]. mean_square: returns the mean of all processes' squares."""
        self._weight, self._eps, self._kind = weight.float(), eps, kind
        self._mean_square = mean_square

    def __call__(self, rows: Tensor) -> Tensor:
        wide = rows.float()
        normed = wide * torch.rsqrt(
            self._mean_square(wide.square().sum(-1, keepdim=True)) + self._eps
        )
        if self._kind.rounds_first:
            normed = normed.to(rows.dtype).float()
        return (normed * (self._weight + self._kind.offset)).to(rows.dtype)


class LayerNorm(Norm):
    """`(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`.

    weight: [width], or [heads, width] if each head of rows [T, heads, width] has its own.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, eps: float, elementwise: Elementwise
    ) -> None:
        self._weight, self._bias, self._eps = weight, bias, eps
        self._layer_norm = elementwise.layer_norm

    def __call__(self, rows: Tensor) -> Tensor:
        if self._weight.ndim == 1:
            return self._layer_norm(rows, self._weight, self._bias, self._eps)
        normed = F.layer_norm(rows.float(), self._weight.shape[-1:], None, None, self._eps)
        return (normed * self._weight.float()).to(rows.dtype)

    def prepare(
        self, calls: StepCalls, rows: Tensor, out: Tensor, residual: Tensor | None = None
    ) -> Tensor:
        weight, bias = self._weight, self._bias
        calls.add(cpu_elementwise.centered_norm(rows, weight, bias, self._eps, out, residual))
        return out
