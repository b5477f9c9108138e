"""Fewer and larger operations for transformers' own model code.

A Llama layer in bf16 is 37 operations beside attention: 7 products, and 30 that only read and write
activations. Here it is 10: one product for q, k and v and one for gate and up, and one kernel for
each norm, each gated activation and each rotary embedding; on some CPUs the products are
ours too (`engine.panels`). No class and no module of transformers is patched: single layers get a
`forward` of their own, which `Fusion.undo` takes away again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from engine.elementwise import make_elementwise
from engine.panels import propose_panels, take_out_of_panels
from engine.proposal import Function, Proposal
from engine.replacements import PROPOSE


class Fusion:
    """What was replaced in a model."""

    def __init__(self) -> None:
        self.replaced: Counter[str] = Counter()
        self.left: Counter[str] = Counter()
        """Layers that only looked as if they could be replaced."""
        self.forwards: dict[nn.Module, Function] = {}
        """Of the layers that were replaced."""

    def __str__(self) -> str:
        text = f"fused: {_listed(self.replaced)}"
        return f"{text}; left as they are: {_listed(self.left)}" if self.left else text

    def consider(self, proposal: Proposal) -> None:
        """Has the next `apply` install what computes the same, if anything does."""
        candidate = proposal.verified()
        if candidate is None:
            self.left[proposal.what] += 1
        else:
            self.replaced[proposal.what] += 1
            self.forwards |= proposal.install(candidate)

    def apply(self) -> None:
        for module, forward in self.forwards.items():
            module.forward = forward

    def undo(self) -> None:
        """Every layer computes as before, if slowly where its weight lies in panels."""
        for module in self.forwards:
            del module.forward

    @contextmanager
    def undone(self) -> Iterator[None]:
        self.undo()
        try:
            yield
        finally:
            self.apply()


@torch.no_grad()
def fuse(model: nn.Module, *, in_panels: bool = False) -> Fusion:
    """Replaces, in place, what it finds in a decoder and what on trial computes the same.

    in_panels: the weights of products too are laid out anew, for the C++ of a CPU.
    """
    fusion = Fusion()
    embedding = next(model.parameters())
    elementwise = make_elementwise(embedding.device)
    # Holds no linear layer, so that the weights of those that are merged are freed one by one.
    layers = [each for each in model.modules() if not isinstance(each, nn.Linear)]
    for layer in layers:
        for propose in PROPOSE:
            proposal = propose(layer, elementwise, embedding.dtype)
            if proposal is not None:
                fusion.consider(proposal)
    for proposal in propose_panels(model) if in_panels else ():
        fusion.consider(proposal)
    fusion.apply()
    return fusion


def unfuse(model: nn.Module, fusion: Fusion) -> None:
    """For good: every layer computes as before, though weights that were merged stay together."""
    fusion.undo()
    take_out_of_panels(model)


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{number} x {what}" for what, number in counts.items()) or "nothing"
