"""Copies an adapter from rank 0 to the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from core.part import Feature
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


def send_installs(features: Iterable[Feature], send: Callable[[Install], object]) -> None:
    """Send every adapter that rank 0 will install to the other ranks, if LoRA is on."""
    adapters = AdapterRegistry.of(features)
    if adapters is not None:
        adapters.on_install = lambda slot, weights: send(install_order(slot, weights))


def carry_out(features: Iterable[Feature], install: Install) -> None:
    """Copy the order's adapter into its slot on this rank."""
    adapters = AdapterRegistry.of(features)
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
