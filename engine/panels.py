"""Linear layers with their weights in panels, as the C++ product of a CPU reads them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from engine.proposal import Function, Proposal
from kernels.cpu.linear import from_panels, linear, to_panels

PROBE_ROWS = 7


class PanelLinear(nn.Linear):
    """A linear layer that holds its weight in panels alone.

    Made of one in place, by its class, as torch's parametrizations are, so that whoever holds the
    layer has the new one. Its own forward takes the weight out again, each time.
    """

    panels: nn.Parameter

    @property
    def weight(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """A copy of what it was."""
        return from_panels(self.panels, self.out_features)


def propose_panels(model: nn.Module) -> Iterator[Proposal]:
    """For each linear layer, one after another, so that a single weight at a time is held twice.

    A weight that another layer shares, such as a head tied to the embedding, stays as it is.
    """
    holders = Counter(
        id(weight) for layer in model.modules() for weight in layer.parameters(recurse=False)
    )
    for layer in list(model.modules()):
        if type(layer) is not nn.Linear or holders[id(layer.weight)] > 1:
            continue
        if layer.weight.dtype == torch.float32:
            yield _proposal(layer)


def take_out_of_panels(model: nn.Module) -> None:
    """Every layer is again what it was."""
    for layer in model.modules():
        if isinstance(layer, PanelLinear):
            own = nn.Parameter(layer.weight, requires_grad=False)
            del layer.panels
            layer.__class__ = nn.Linear  # pyright: ignore[reportAttributeAccessIssue]
            layer.register_parameter("weight", own)


def _proposal(layer: nn.Linear) -> Proposal:
    panels = nn.Parameter(to_panels(layer.weight), requires_grad=False)
    width, bias = layer.out_features, layer.bias

    def install(candidate: Function) -> Mapping[nn.Module, Function]:
        del layer.weight
        layer.__class__ = PanelLinear
        layer.panels = panels
        return {layer: candidate}

    return Proposal(
        what="product in panels",
        own=layer.forward,
        candidates=[partial(linear, panels=panels, num_columns=width, bias=bias)],
        samples=[(torch.randn(1, PROBE_ROWS, layer.in_features),)],
        install=install,
    )
