"""Linear layers with their weights in panels, as the C++ product of a CPU reads them.

A model that was saved in bf16 has weights that bf16 holds to the bit. In panels they stay bf16
where fp32 is computed with: half the memory to read, and the same numbers. A model in bf16 has them
in pairs on CPUs that multiply those.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from engine.proposal import Function, Proposal
from kernels.cpu.library import SUFFIXES
from kernels.cpu.linear import from_panels, has_pairs, linear, to_pairs, to_panels

PROBE_ROWS = 7


class PanelLinear(nn.Linear):
    """A linear layer that holds its weight in panels alone.

    Made of one in place, by its class, as torch's parametrizations are, so that whoever holds the
    layer has the new one. Its own forward takes the weight out again, each time.
    """

    panels: nn.Parameter
    is_narrowed: bool
    """The weight was fp32, and the panels are bf16."""

    @property
    def weight(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """A copy of what it was."""
        weight = from_panels(self.panels, self.out_features)
        return weight.float() if self.is_narrowed else weight


def propose_panels(model: nn.Module) -> Iterator[Proposal]:
    """For each linear layer, one after another, so that a single weight at a time is held twice.

    A head tied to the embedding leaves it its weight, and has panels of its own if bf16 holds them.
    """
    holders = Counter(
        id(weight) for layer in model.modules() for weight in layer.parameters(recurse=False)
    )
    for layer in list(model.modules()):
        if type(layer) is not nn.Linear or layer.weight.dtype not in SUFFIXES:
            continue
        weight = _narrowed(layer.weight)
        if holders[id(layer.weight)] == 1:
            yield _proposal(layer, weight, partial(_replace, layer))
        elif weight.dtype == torch.bfloat16:
            yield _proposal(layer, weight, partial(layer.register_buffer, "panels"))


def take_out_of_panels(model: nn.Module) -> None:
    """Every layer is again what it was."""
    for layer in model.modules():
        if isinstance(layer, PanelLinear):
            own = nn.Parameter(layer.weight, requires_grad=False)
            del layer.panels, layer.is_narrowed
            layer.__class__ = nn.Linear  # pyright: ignore[reportAttributeAccessIssue]
            layer.register_parameter("weight", own)
        elif type(layer) is nn.Linear and "panels" in dict(layer.named_buffers()):
            del layer.panels


def _narrowed(weight: Tensor) -> Tensor:
    """In bf16, where that loses no bit."""
    narrow = weight.bfloat16()
    return narrow if torch.equal(narrow.to(weight.dtype), weight) else weight


def _proposal(layer: nn.Linear, weight: Tensor, place: Callable[[nn.Parameter], None]) -> Proposal:
    like = layer.weight
    is_paired = like.dtype == torch.bfloat16 and layer.in_features % 2 == 0 and has_pairs()
    panels = nn.Parameter((to_pairs if is_paired else to_panels)(weight), requires_grad=False)
    bias = None if layer.bias is None else layer.bias.float()

    def install(candidate: Function) -> Mapping[nn.Module, Function]:
        place(panels)
        return {layer: candidate}

    return Proposal(
        what="product in panels" if weight.dtype == like.dtype else "product in panels of bf16",
        own=layer.forward,
        candidates=[partial(linear, panels=panels, num_columns=layer.out_features, bias=bias)],
        samples=[(torch.randn(1, PROBE_ROWS, layer.in_features, dtype=like.dtype),)],
        install=install,
    )


def _replace(layer: nn.Linear, panels: nn.Parameter) -> None:
    """The layer holds its panels instead of its weight."""
    is_narrowed = panels.dtype != layer.weight.dtype
    del layer.weight
    layer.__class__ = PanelLinear
    assert isinstance(layer, PanelLinear)
    layer.panels, layer.is_narrowed = panels, is_narrowed
