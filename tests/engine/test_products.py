"""Which linear layers may have adapters."""

from __future__ import annotations

import torch
from torch import nn

from engine.lora.products import find_products


class Layers(nn.Module):
    """Of each kind of use one."""

    def __init__(self):
        super().__init__()
        self.every, self.twice, self.some, self.unused, self.by_weight, self.head = (
            nn.Linear(4, 4) for _ in range(6)
        )

    def forward(self, x):
        """x: [1, T, 4]."""
        x = self.twice(self.twice(self.every(x)))
        x = torch.cat([self.some(x[:, :2]), x[:, 2:]], 1)
        return self.head(x @ self.by_weight.weight)


def test_only_what_sees_each_token_once():
    """A mask with a row for each token would fit none of the others."""
    model = Layers()
    products = find_products(model, model.head, lambda: model(torch.zeros(1, 5, 4)), 5)
    assert [list(each.layers) for each in products] == [["every"]]
    assert not model.every._forward_pre_hooks, "nothing is watched any more"
