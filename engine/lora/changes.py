"""Encodes an adapter's weights for the other processes of a group."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import torch
from torch import Tensor

from engine.lora.files import AdapterWeights, LayerSize, LayerWeights


class _Install(msgspec.Struct, frozen=True, array_like=True):
    slot: int
    layers: Mapping[str, tuple[int, bytes, bytes]]
    """For each layer the LoRA rank r, A [r, in] and B [out, r], in the layer's dtype."""


def encoded(slot: int, weights: AdapterWeights) -> bytes:
    """Return the change of a slot that gets an adapter."""
    layers = {
        name: (layer.rank, _bytes(layer.a), _bytes(layer.b))
        for name, layer in weights.layers.items()
    }
    return msgspec.msgpack.encode(_Install(slot, layers))


def decoded(change: bytes, sizes: Mapping[str, LayerSize]) -> tuple[int, AdapterWeights]:
    """Return the slot and the weights of a change."""
    install = msgspec.msgpack.decode(change, type=_Install)
    layers = {
        name: _layer(rank, a, b, sizes[name]) for name, (rank, a, b) in install.layers.items()
    }
    return install.slot, AdapterWeights(layers)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def _layer(rank: int, a: bytes, b: bytes, size: LayerSize) -> LayerWeights:
    shapes = (rank, size.in_features), (size.out_features, rank)
    # A copy, since a tensor over bytes must not be written.
    tensors = (torch.frombuffer(bytearray(data), dtype=size.dtype) for data in (a, b))
    a_tensor, b_tensor = (tensor.view(shape) for tensor, shape in zip(tensors, shapes, strict=True))
    return LayerWeights(a_tensor, b_tensor)
