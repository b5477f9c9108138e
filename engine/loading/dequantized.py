"""transformers' model with the dequantized weights of a quantized model: the gate's reference."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from engine.loading.gate import cut_to_layers, load_reference
from engine.loading.model_source import ModelSource
from engine.model.checkpoint import Checkpoint, open_published
from engine.model.families import ExpertNames
from engine.model.quantization.at_load import HEAD_PRECISIONS, quantize_weight
from engine.model.quantization.mxfp4 import Mxfp4
from engine.model.quantization.schemes import Scheme, read_scheme
from engine.model.spec import DecoderSpec


def load_rounded(
    source: ModelSource,
    spec: DecoderSpec,
    load_as_stored: Callable[[ModelSource, DecoderSpec], Any],
) -> Any:
    """Load transformers' model with the weights of a `QuantizingLoader`, dequantized.

    load_as_stored: loads it if no weight of the checkpoint is quantized. The source's config sets
    the number of layers. Raises as `load_reference` does.
    """
    scheme = None if source.is_dummy else read_scheme(source.config)
    if scheme is None:
        model = load_as_stored(source, spec)
    else:
        model = _load_dequantized(source, spec, scheme)
    if source.precision is not None:
        round_weights(model, spec.family.experts, source.precision)
    return model


def _load_dequantized(source: ModelSource, spec: DecoderSpec, scheme: Scheme) -> Any:
    """Load transformers' model, with the checkpoint's quantized weights dequantized."""
    config: Any = source.config
    checkpoint = open_published(source.model_dir)
    layer = re.compile(rf"(?:^|\.){spec.family.layers}\.(\d+)\.")

    def is_needed(name: str) -> bool:
        found = layer.search(name)
        is_in_model = found is None or int(found[1]) < config.num_hidden_layers
        return is_in_model and not name.endswith(scheme.unused_suffixes)

    checkpoint.keep(is_needed)
    cut_to_layers(checkpoint, source, spec)
    state = dequantized(checkpoint, scheme, getattr(config, "num_local_experts", 1))
    if source.is_gguf:
        from engine.model.gguf.dense import with_merged_experts

        state = with_merged_experts(state, spec.family.experts)
    return load_reference(source.without_quantization(), state=state)


def dequantized(checkpoint: Checkpoint, scheme: Scheme, num_experts: int) -> dict[str, Tensor]:
    """Take all tensors by their published names, with quantized weights dequantized."""
    state: dict[str, Tensor] = {}
    for name in checkpoint.names():
        marker = next((marker for marker in scheme.markers if name.endswith(marker)), None)
        if marker is None:
            continue
        layer = name.removesuffix(marker)
        weight = scheme.read(checkpoint, layer)
        if isinstance(scheme, Mxfp4):  # merged experts, which transformers transposes
            experts = weight.dequantized().unflatten(0, (num_experts, -1))
            state[layer] = experts.transpose(1, 2).contiguous()
        else:
            state[f"{layer}.weight"] = weight.dequantized()
    return state | {name: checkpoint.take_stored(name) for name in checkpoint.names()}


@torch.no_grad()
def round_weights(model: Any, names: ExpertNames | None, precision: str) -> None:
    """Round the linear layers, experts and head of transformers' model as option.quantize does.

    names: the family's names of experts; None if it has no experts. precision: the option's value.
    """
    kept = (".kv_b_proj",)
    if names:
        kept += (f".{names.router}", f".{names.router}.layer")
    if names and names.shared:
        kept += (f"{names.shared}_gate",)
    for name, module in model.named_modules():
        is_linear = isinstance(module, nn.Linear | Conv1D) and not name.endswith(kept)
        if is_linear and module is not model.get_output_embeddings():
            weight = module.weight.T if isinstance(module, Conv1D) else module.weight
            weight.copy_(_rounded(weight, precision))
    if precision in HEAD_PRECISIONS:
        head = model.get_output_embeddings()
        rounded = _rounded(head.weight, HEAD_PRECISIONS[precision]).to(head.weight.dtype)
        # A new parameter, because a tied head shares its parameter with the embedding.
        head.weight = nn.Parameter(rounded, requires_grad=False)
    modules = (module for module in model.modules() if not isinstance(module, nn.Conv1d))
    for parameter in (p for module in modules for p in module.parameters(recurse=False)):
        if parameter.dim() == 3:
            is_transposed = names is not None and names.is_interleaved
            weight = parameter.transpose(1, 2) if is_transposed else parameter
            weight.copy_(_rounded(weight.flatten(0, 1), precision).view(weight.shape))


def _rounded(weight: Tensor, precision: str) -> Tensor:
    return quantize_weight(weight, precision, weight.device).dequantized()
