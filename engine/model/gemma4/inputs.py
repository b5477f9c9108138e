"""Inputs of each layer: a small embedding of each token for every layer (Gemma 4 E2B and E4B)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.model.activations import make_gated
from engine.model.checkpoint import Checkpoint
from engine.model.loader import Loader, Source
from engine.model.spec import DecoderSpec

TABLE = "embed_tokens_per_layer"
PROJECTION = "per_layer_model_projection"


def input_width(config: Any) -> int:
    """Return how many numbers a layer gets of each token; 0 if layers have no inputs."""
    return getattr(config, "hidden_size_per_layer_input", None) or 0


class LayerInputs:
    """`(norm(project(embedding)) + own embedding) / sqrt(2)`, of all layers at once."""

    def __init__(self, loader: Loader, spec: DecoderSpec, num_layers: int) -> None:
        """num_layers: the first layers, those that are loaded."""
        config: Any = spec.config
        prefix, self._width = spec.family.prefix, input_width(config)
        columns = num_layers * self._width
        table = loader.embedding(
            f"{prefix}{TABLE}.weight", config.vocab_size_per_layer_input, columns
        )
        self._look_up = loader.group.look_up(table, config.vocab_size_per_layer_input)
        self._project = loader.linear([Source(f"{prefix}{PROJECTION}", columns)], spec.hidden_size)
        self._norm = loader.norm(
            f"{prefix}per_layer_projection_norm", (self._width,), spec.family.norm, spec.norm_eps
        )
        self._scale = spec.hidden_size**-0.5

    def __call__(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """Return [T, layers, width]. token_ids: [T]. hidden: their embeddings, [T, hidden]."""
        by_layer = (-1, self._width)
        projected = self._norm((self._project(hidden) * self._scale).unflatten(-1, by_layer))
        own = self._look_up(token_ids).unflatten(-1, by_layer) * self._width**0.5
        return (projected + own) * 2**-0.5


class LayerInput:
    """`x += norm(project(activation(gate(x)) * input))`, at the end of a layer."""

    def __init__(self, loader: Loader, spec: DecoderSpec, name: str) -> None:
        """name: of the layer."""
        width = input_width(spec.config)
        gate = Source(f"{name}.per_layer_input_gate", width)
        self._gate = loader.linear([gate], spec.hidden_size)
        self._project = loader.linear(
            [Source(f"{name}.per_layer_projection", spec.hidden_size)], width
        )
        self._norm = loader.norm(
            f"{name}.post_per_layer_input_norm",
            (spec.hidden_size,),
            spec.family.norm,
            spec.norm_eps,
        )
        self._activate = make_gated(spec.activation, loader)

    def __call__(self, hidden: Tensor, layer_input: Tensor) -> Tensor:
        """Return the new residual stream. hidden: [T, hidden]. layer_input: [T, width]."""
        gated = self._activate(torch.cat([self._gate(hidden), layer_input], -1))
        return hidden + self._norm(self._project(gated))


def keep_first_layers(checkpoint: Checkpoint, config: Any) -> None:
    """Cut the tensors that have a part for each layer to the layers that `config` has."""
    count = config.num_hidden_layers * input_width(config)
    for name in checkpoint.names():
        if f"{TABLE}." in name:
            checkpoint.change(name, lambda table: table[:, :count])
        elif f"{PROJECTION}." in name:
            checkpoint.change(name, lambda rows: rows[:count])
