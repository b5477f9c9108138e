"""Puts our own layers into a transformers model, after comparing both."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from core.foreign_code import contained
from engine.attention.call import UnsupportedModelError
from engine.encoder.encoder import Encoder
from engine.encoder.families import FAMILIES, EncoderFamily
from engine.encoder.layer import layer_kinds
from engine.loading.gate import MAX_KERNEL_ERROR, MAX_RELATIVE_ERROR, relative_error
from engine.loading.model_source import ModelSource
from engine.model.checkpoint import Checkpoint
from engine.model.loader import Loader
from engine.model.quantization.schemes import QuantizingLoader

PROBE_LENGTHS = (40, 23)
"""Tokens of the texts that are compared. The first has as many more as a window, and both have
fewer if the model takes fewer."""
PROBE_WINDOW = 24
"""The longest window of a decoder in the comparison: those of models have thousands of tokens."""


@torch.inference_mode()
def use_own_layers(model: Any, source: ModelSource, task: str) -> str:
    """Replace the layers of a loaded model by ours if they compute the same. Return whose they are.

    model: transformers' model, with or without a head, on its device. Raises ConfigurationError if
    its own layers serve `task` and an option needs ours.
    """
    base: Any = getattr(model, "base_model", None)
    model_type = source.config.model_type
    try:
        family = FAMILIES.get(model_type)
        if family is None or base is None:
            raise UnsupportedModelError(f"model type {model_type} is not in the family table")
        if source.quantization is not None:
            raise UnsupportedModelError(f"its checkpoint has quant_method={source.quantization}")
        _check(base, family, source)
    except (UnsupportedModelError, AttributeError) as error:  # remote code has other modules
        source.reject_own_options(f"transformers' code computes {task}: {error}")
        return f"transformers' code ({model_type}): {error}"
    base.forward = _encoder(base, family, source).forward
    return f"own ({', '.join(filter(None, (model_type, source.precision)))})"


def own_encoder(model: Any) -> Encoder | None:
    """Return our own layers of a model; None if it has its own."""
    forward = getattr(getattr(model, "base_model", None), "forward", None)
    encoder = getattr(forward, "__self__", None)
    return encoder if isinstance(encoder, Encoder) else None


def _check(base: Any, family: EncoderFamily, source: ModelSource) -> None:
    """Raise UnsupportedModelError unless our first layers compute the same as transformers'.

    As for decoders, in fp32 first. If the model will serve in low precision or quantized, then once
    more as it will serve, with a loose limit.
    """
    exact = replace(source.for_comparison(), precision=None)
    first = _first_layers(base, family).float()
    _compare(first, family, exact, MAX_RELATIVE_ERROR[torch.float32])
    if source.dtype != torch.float32 or source.precision is not None:
        _compare(_first_layers(base, family), family, source, MAX_KERNEL_ERROR)


def _first_layers(base: Any, family: EncoderFamily) -> Any:
    """Return such a model with only as many of its layers as include every kind."""
    layers = base.get_submodule(family.layers)
    kinds = layer_kinds(base.config, len(layers))
    num_layers = 1 + max(kinds.index(kind) for kind in kinds)
    base.set_submodule(family.layers, layers[:num_layers])
    try:
        first = deepcopy(base)
        if family.is_causal and getattr(first.config, "sliding_window", None) is not None:
            first.config.sliding_window = min(first.config.sliding_window, PROBE_WINDOW)
        return first
    finally:
        base.set_submodule(family.layers, layers)


def _compare(base: Any, family: EncoderFamily, source: ModelSource, limit: float) -> None:
    """Compare the last hidden states of a padded batch. The model loses its layers."""
    batch: dict[str, Any] = _probe(base)
    try:
        with contained:
            expected = base(**batch).last_hidden_state
    except Exception as error:  # model code may raise anything on an unexpected config
        raise UnsupportedModelError(f"transformers' own layers fail: {error}") from error
    states = _encoder(base, family, source).forward(**batch).last_hidden_state
    assert states is not None
    is_text = batch["attention_mask"].bool()
    error = relative_error(states[is_text].float(), expected[is_text].float())
    if error > limit:
        raise UnsupportedModelError(
            f"our layers and its own give different hidden states (relative error {error:.2g})"
        )


def _encoder(base: Any, family: EncoderFamily, source: ModelSource) -> Encoder:
    """Return our layers for a model, which loses its own."""
    origin = str(source.model_dir)
    tensors = base.get_submodule(family.layers).state_dict(prefix=f"{family.layers}.")
    entries = {name: (origin, tensors[name].detach) for name in list(tensors)}
    tensors.clear()  # a tensor is freed when the checkpoint has given it away
    checkpoint = Checkpoint(entries, origin)
    entries.clear()
    if source.precision is None:
        return Encoder(base, family, Loader(checkpoint, source.device, source.dtype))
    loader = QuantizingLoader(
        checkpoint,
        source.device,
        source.dtype,
        precision=source.precision,
        is_exact=source.is_exact,
    )
    return Encoder(base, family, loader)


def _probe(base: Any) -> dict[str, Tensor]:
    """Return a batch of two texts, the second one padded. Their tokens alternate between types.

    The first one is longer than a window, if the model's position table allows it.
    """
    positions = getattr(getattr(base, "embeddings", None), "position_embeddings", None)
    window = getattr(base.config, "sliding_window", None) or 0
    longest, other = PROBE_LENGTHS[0] + window, PROBE_LENGTHS[1]
    if positions is not None:
        first = -1 if positions.padding_idx is None else positions.padding_idx
        longest = min(longest, positions.num_embeddings - 1 - first)
    ids = torch.arange(1, longest + 1, device=base.device) * 7919 % base.config.vocab_size
    ids = torch.stack([ids, ids.flip(0)])
    mask = torch.ones_like(ids)
    mask[1, other:] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    if getattr(base.config, "type_vocab_size", 0) > 1:
        types = torch.arange(longest, device=base.device) % 2
        batch["token_type_ids"] = types.expand_as(ids)
    return batch
