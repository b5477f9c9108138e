"""The linear layers of a model that adapters may add to, as its fused forward computes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from engine.merged import MergedLinear, MergedPart

Rows = slice
"""Of a product's outputs, those of one layer."""


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """One matrix product of a forward pass: of a layer, or of several that were merged."""

    module: nn.Module
    """Takes [..., in_features], returns [..., out_features]."""
    in_features: int
    dtype: torch.dtype
    layers: Mapping[str, Rows]
    """By their names in the model, which are PEFT's too."""


def find_products(
    model: nn.Module, without: nn.Module | None, probe: Callable[[], object], num_tokens: int
) -> list[Product]:
    """Those that a forward pass calls once, with a row for each token, as experts of a router are
    not; and not the head, `without`. To be called when nothing more is fused.

    probe: does a forward pass over `num_tokens` tokens.
    """
    products = _linear_layers(model, without)
    rows: dict[Product, list[int]] = {each: [] for each in products}

    def watch(product: Product, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        rows[product].append(inputs[0].shape[:-1].numel() if inputs else 0)

    hooks = [
        product.module.register_forward_pre_hook(partial(watch, product)) for product in products
    ]
    probe()
    for hook in hooks:
        hook.remove()
    return [product for product in products if rows[product] == [num_tokens]]


def _linear_layers(model: nn.Module, without: nn.Module | None) -> list[Product]:
    products: list[Product] = []
    merged: dict[MergedLinear, dict[str, Rows]] = {}
    for name, module in model.named_modules():
        if module is without:
            continue
        # One whose own forward was taken back computes with its rows alone.
        if isinstance(module, MergedPart) and "forward" in vars(module):
            merged.setdefault(module.merged, {})[name] = module.rows
        elif isinstance(module, nn.Linear):
            products.append(_whole(name, module, module.in_features, module.out_features))
        elif isinstance(module, Conv1D):
            products.append(_whole(name, module, *module.weight.shape))
    return products + [
        Product(module, module.weight.shape[1], module.weight.dtype, layers)
        for module, layers in merged.items()
    ]


def _whole(name: str, module: nn.Linear | Conv1D, in_features: int, out_features: int) -> Product:
    return Product(module, in_features, module.weight.dtype, {name: slice(0, out_features)})
