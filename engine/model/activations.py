"""The nonlinearities of MLPs, by transformers' names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from engine.model.loader import Loader

Activation = Callable[[Tensor], Tensor]
FUSED: Mapping[str, Literal["silu", "gelu_tanh"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
"""Those that our kernels compute together with the product of gate and up."""


def make_gated(name: str, loader: Loader) -> Activation:
    """[T, 2 * I], gates first → activation(gate) * up, [T, I]."""
    fused = FUSED.get(name)
    if fused is not None:
        kernel = loader.elementwise.gated_activation
        return lambda gate_up: kernel(gate_up, fused)
    activation = ACT2FN[name]

    def compute(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return activation(gate) * up

    return compute


def make_plain(name: str, loader: Loader, block: str) -> Activation:
    """block: of the MLP, below which an activation may have weights."""
    return XIELU(loader, block) if name == "xielu" else ACT2FN[name]


class XIELU:
    """A square above 0, an exponential below, both with learned steepness (Huang, 2024)."""

    BETA, EPS = 0.5, -1e-6

    def __init__(self, loader: Loader, block: str) -> None:
        positive, negative = (
            F.softplus(loader.tensor(f"{block}.act_fn.{name}", 1))
            for name in ("alpha_p", "alpha_n")
        )
        self._positive, self._negative = positive, negative + self.BETA

    def __call__(self, x: Tensor) -> Tensor:
        below = (torch.expm1(x.clamp(max=self.EPS)) - x) * self._negative
        return torch.where(x > 0, self._positive * x * x, below) + self.BETA * x
