"""Copies an adapter from rank 0 to the other ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.lora.adapter_registry import AdapterRegistry
from engine.lora.files import AdapterWeights, LayerSize, LayerWeights
from engine.ranks.order_types import Install


def install_order(slot: int, weights: AdapterWeights) -> Install:
    """Return the order to copy an adapter into a slot."""
    layers = {
        name: (layer.rank, _bytes(layer.a), _bytes(layer.b))
        for name, layer in weights.layers.items()
    }
    return Install(slot, layers)


def carry_out(adapters: AdapterRegistry | None, install: Install) -> None:
    """Copy the order's adapter into its slot on this rank."""
    assert adapters is not None, "all ranks have the same options"
    sizes = adapters.memory.sizes
    layers = {
        name: _layer(rank, a, b, sizes[name]) for name, (rank, a, b) in install.layers.items()
    }
    adapters.memory.write(install.slot, AdapterWeights(layers))


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def _layer(rank: int, a: bytes, b: bytes, size: LayerSize) -> LayerWeights:
    shapes = (rank, size.in_features), (size.out_features, rank)
    # A copy, since a tensor over bytes must not be written.
    tensors = (torch.frombuffer(bytearray(data), dtype=size.dtype) for data in (a, b))
    a_tensor, b_tensor = (tensor.view(shape) for tensor, shape in zip(tensors, shapes, strict=True))
    return LayerWeights(a_tensor, b_tensor)
