"""Random weights for our own decoder, made tensor by tensor.

While it loads, a process holds its own shards and one whole tensor, never the whole model.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.loading.gate import load_reference
from engine.loading.model_source import ModelSource
from engine.model.activations import XIELU

STANDARD_DEVIATION = 0.02
"""The standard deviation for models whose config.json has no `initializer_range`."""
CONSTANTS = {"act_fn.beta": XIELU.BETA, "act_fn.eps": XIELU.EPS}
"""Values of tensors other than weights, by the ends of their names."""


def random_weights(source: ModelSource) -> dict[str, Callable[[], Tensor]]:
    """Return functions that make a model's tensors, by the names of transformers' modules.

    Matrices are normally distributed, biases 0 and other vectors 1. A tensor's values depend on its
    name and shape and on the kind of device, so all processes make the same.

    Raises as `load_reference` does.
    """
    model = load_reference(replace(source, device=torch.device("meta")))
    deviation = _deviation(source)
    return {
        name: partial(random_tensor, name, tensor, deviation, source.device)
        for name, tensor in _tensors(model)
    }


def load_random_reference(source: ModelSource, attention: str = "eager") -> Any:
    """Load transformers' model with the weights of `random_weights`.

    Raises as `load_reference` does.
    """
    model = load_reference(source, attention)
    for name, tensor in _tensors(model):
        _fill(tensor, name, _deviation(source))
    return model


def random_tensor(name: str, like: Tensor, deviation: float, device: torch.device) -> Tensor:
    """Return a tensor with the shape and dtype of `like`, which is on the meta device."""
    tensor = torch.empty_like(like, device=device)
    _fill(tensor, name, deviation)
    return tensor


def _tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's tensors by name. A tied head is the same tensor as the embedding, so it is
    yielded only once, as the embedding."""
    for name, tensor in model.state_dict().items():
        if name not in model.all_tied_weights_keys:
            yield name, tensor


def _deviation(source: ModelSource) -> float:
    return getattr(source.config, "initializer_range", None) or STANDARD_DEVIATION


def _fill(tensor: Tensor, name: str, deviation: float) -> None:
    for end, value in CONSTANTS.items():
        if name.endswith(end):
            tensor.fill_(value)
            return
    if name.endswith("bias"):
        tensor.zero_()
    elif tensor.dim() < 2:
        tensor.fill_(1.0)
    else:
        generator = torch.Generator(tensor.device).manual_seed(zlib.crc32(name.encode()))
        tensor.normal_(0.0, deviation, generator=generator)
