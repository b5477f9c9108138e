"""Activation functions of MLPs, by transformers' names."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.loader import Loader
from kernels.cpu import elementwise as cpu_elementwise
from kernels.cpu.elementwise import GatedActivation

Activation = Callable[[Tensor], Tensor]
FUSED: Mapping[str, GatedActivation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
"""Activations that our kernels fuse with the multiplication of gate and up."""

BATCH_INVARIANT: Mapping[str, Activation] = {
    "sigmoid": cpu_elementwise.sigmoid,
    "silu": lambda x: x * cpu_elementwise.sigmoid(x),
    "swish": lambda x: x * cpu_elementwise.sigmoid(x),
    "quick_gelu": lambda x: x * cpu_elementwise.sigmoid(1.702 * x),
    "gelu": cpu_elementwise.gelu,
    "gelu_pytorch_tanh": cpu_elementwise.gelu_tanh,
}
"""Activations without a gate on CPUs, where torch's depend on the number of rows and threads."""


def make_gated(name: str, loader: Loader) -> Activation:
    """Return a function from [T, 2 * I], gates first, to activation(gate) * up, [T, I]."""
    fused = FUSED.get(name)
    if fused is not None:
        kernel = loader.elementwise.gated_activation
        return lambda gate_up: kernel(gate_up, fused)
    activation = _plain(name, loader)

    def compute(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return activation(gate) * up

    return compute


def make_plain(name: str, loader: Loader, block: str) -> Activation:
    """Return an elementwise activation. block: the MLP's name, for activations with weights."""
    return XIELU(loader, block) if name == "xielu" else _plain(name, loader)


def _plain(name: str, loader: Loader) -> Activation:
    """Return transformers' function, or one of ours whose bits do not depend on the other rows."""
    if loader.device.type == "cpu" and name in BATCH_INVARIANT:
        return BATCH_INVARIANT[name]
    # Imported only here, since it imports transformers' models, which takes over a second.
    from transformers.activations import ACT2FN

    return ACT2FN[name]


class XIELU:
    """xIELU: quadratic above 0, exponential below, with learned coefficients (Huang, 2024)."""

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
