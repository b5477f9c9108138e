"""Linear layers of the same input as one product, for model code that calls them one by one.

transformers' attention calls `q_proj(x)`, `k_proj(x)` and `v_proj(x)`. Over the 50 rows of a decode
step each is too small for a GPU. Here the first call computes all, and the others take their slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn


class MergedLinear(nn.Module):
    """The weights of several linear layers below each other: [sum of out_features, in_features].

    NOTE: inputs are told apart by identity, so model code must not change one in place between
    the calls. None of transformers' does; the gate at load would see it.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.sizes = [each.out_features for each in linears]
        self.whole = _below_each_other(linears)
        self._input: Tensor | None = None
        self._waiting: dict[int, Tensor] = {}

    @property
    def weight(self) -> Tensor:
        return self.whole.weight

    @property
    def bias(self) -> Tensor | None:
        return self.whole.bias

    def forward(self, x: Tensor) -> Tensor:
        """All outputs side by side."""
        return self.whole(x)

    def take(self, index: int, x: Tensor) -> Tensor | None:
        """Output `index`, a view of the whole product; None if that was of another input.

        Whoever comes first has all of it computed. Each output is handed out once, so that after
        the last one nothing of a step is kept alive here.
        """
        if index not in self._waiting:
            self._input, self._waiting = x, dict(enumerate(self(x).split(self.sizes, -1)))
        output, computed_from = self._waiting.pop(index), self._input
        if not self._waiting:
            self._input = None
        return output if computed_from is x else None


class MergedPart(nn.Linear):
    """One of the merged layers, to look at as it was; its own forward uses its rows alone."""

    def __init__(self, merged: MergedLinear, index: int) -> None:
        nn.Module.__init__(self)  # not nn.Linear's, which would make a weight
        self.merged = merged
        self.index = index
        end = list(accumulate(merged.sizes))[index]
        self.rows = slice(end - merged.sizes[index], end)
        self.in_features, self.out_features = merged.whole.in_features, merged.sizes[index]

    @property
    def weight(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.merged.weight[self.rows]

    @property
    def bias(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        bias = self.merged.whole.bias
        return None if bias is None else bias[self.rows]

    def take(self, x: Tensor) -> Tensor:
        """What `forward` computes, out of the common product where that is of the same input."""
        output = self.merged.take(self.index, x)
        return nn.Linear.forward(self, x) if output is None else output


def can_merge(linears: Sequence[Any]) -> bool:
    """Whether they are plain linear layers of one width, type and device, all or none with bias."""
    if any(type(each) is not nn.Linear for each in linears):
        return False
    kinds = {(each.in_features, each.weight.dtype, each.weight.device) for each in linears}
    return len(kinds) == 1 and len({each.bias is None for each in linears}) == 1


def _below_each_other(linears: Sequence[nn.Linear]) -> nn.Linear:
    sizes = linears[0].in_features, sum(each.out_features for each in linears)
    whole = nn.Linear(*sizes, bias=False, device="meta")  # of what follows
    whole.weight = _joined([each.weight for each in linears])
    biases = [each.bias for each in linears if each.bias is not None]
    whole.register_parameter("bias", _joined(biases) if biases else None)
    return whole


def _joined(tensors: Sequence[Tensor]) -> nn.Parameter:
    return nn.Parameter(torch.cat(list(tensors)), requires_grad=False)
