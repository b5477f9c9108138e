"""Reads an adapter in PEFT's format: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from core.errors import RequestError
from engine.digest import digest_files

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<layer>.+)\.lora_(?P<side>[AB])\.weight")
_MODEL_CHANGING_INITS = ("pissa", "olora", "corda")
"""Initializations that subtract the initial `B @ A` from the model's own weights."""


class _Config(msgspec.Struct):
    """The fields of adapter_config.json that affect inference; the others concern training."""

    lora_alpha: float
    peft_type: str = "LORA"
    use_rslora: bool = False
    use_dora: bool = False
    bias: str = "none"
    lora_bias: bool = False
    modules_to_save: list[str] | None = None
    alpha_pattern: dict[str, float] | None = None
    layer_replication: Any = None
    target_parameters: Any = None
    trainable_token_indices: Any = None
    alora_invocation_tokens: Any = None
    init_lora_weights: Any = True


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """An adapter's factors for one linear layer, in the layer's dtype.

    They add `b @ a` to the layer's weight.
    """

    a: Tensor
    """[rank, in]."""
    b: Tensor
    """[out, rank], multiplied by the adapter's scale."""

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """An adapter's weights, on the host."""

    layers: Mapping[str, LayerWeights]
    """By the linear layers' names in the model."""
    digest: str = ""
    """Of the files; '' if another process read them."""

    @property
    def rank(self) -> int:
        """The highest rank of any layer."""
        return max(layer.rank for layer in self.layers.values())


@dataclass(frozen=True, slots=True)
class LayerSize:
    """Features and dtype of a linear layer."""

    in_features: int
    out_features: int
    dtype: torch.dtype


def read_adapter(folder: Path, sizes: Mapping[str, LayerSize], max_rank: int) -> AdapterWeights:
    """Read and check an adapter. sizes: layers that can be adapted, by name.

    Raises RequestError with field `src` if the folder holds no adapter, an unsupported one or one
    for another model.
    """
    config = _read_config(folder)
    tensors = _read_tensors(folder)
    sides: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = _TENSOR.fullmatch(key)
        if match is None:
            raise _rejected(
                folder,
                f"'{key}' is not in a linear layer; adapters of embeddings are not supported",
            )
        layer = match["layer"]
        inner = layer.replace("language_model.", "", 1)  # of a model that also has other parts
        below = layer.partition(".")[2]  # of a model with a head: the name begins with its body's
        known = next((name for name in (inner, layer, below) if name in sizes), layer)
        sides.setdefault(known, {})[match["side"]] = tensor
    if not sides:
        raise _rejected(folder, f"{WEIGHTS} holds no tensors")
    for name, pair in sides.items():
        _check_layer(folder, name, pair, sizes, max_rank)
    layers = {name: _layer(folder, name, pair, config, sizes[name]) for name, pair in sides.items()}
    return AdapterWeights(layers, digest_files([folder / CONFIG, folder / WEIGHTS])[:12])


def _read_config(folder: Path) -> _Config:
    try:
        config = msgspec.json.decode((folder / CONFIG).read_bytes(), type=_Config)
    except OSError as error:
        raise _rejected(folder, f"{CONFIG} cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise _rejected(folder, f"{CONFIG}: {error}") from None
    unsupported = {
        f"peft_type {config.peft_type}": config.peft_type != "LORA",
        "DoRA (use_dora)": config.use_dora,
        "biases (bias, lora_bias)": config.bias != "none" or config.lora_bias,
        f"modules_to_save={config.modules_to_save}": config.modules_to_save,
        "alpha_pattern": config.alpha_pattern,
        "layer_replication": config.layer_replication,
        "target_parameters": config.target_parameters,
        "new tokens (trainable_token_indices)": config.trainable_token_indices,
        "alora_invocation_tokens": config.alora_invocation_tokens,
    }
    for feature, is_used in unsupported.items():
        if is_used:
            raise _rejected(folder, f"{feature} cannot be served; merge the adapter into the model")
    if str(config.init_lora_weights).startswith(_MODEL_CHANGING_INITS):
        raise _rejected(
            folder,
            f"init_lora_weights={config.init_lora_weights} has changed the model's weights; save "
            "it with PEFT's path_initial_model_for_weight_conversion",
        )
    return config


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    try:
        return load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise _rejected(folder, f"{WEIGHTS} cannot be read: {error}") from None


def _check_layer(
    folder: Path,
    name: str,
    pair: Mapping[str, Tensor],
    sizes: Mapping[str, LayerSize],
    max_rank: int,
) -> None:
    size = sizes.get(name)
    if size is None:
        known = ", ".join(sorted({layer.rpartition(".")[2] for layer in sizes}))
        raise _rejected(
            folder, f"this model has no layer '{name}' to adapt; its linear layers are {known}"
        )
    if len(pair) < 2 or any(tensor.ndim != 2 for tensor in pair.values()):
        raise _rejected(folder, f"{name} needs two matrices, lora_A and lora_B")
    (rank, in_features), (out_features, rank_of_b) = pair["A"].shape, pair["B"].shape
    if (in_features, out_features) != (size.in_features, size.out_features) or rank != rank_of_b:
        raise _rejected(
            folder,
            f"{name} is {out_features} x {rank_of_b} times {rank} x {in_features}, but the model's "
            f"layer is {size.out_features} x {size.in_features}: it was made for another model",
        )
    if not 1 <= rank <= max_rank:
        raise _rejected(
            folder, f"{name} has rank {rank}, but option.max_lora_rank is {max_rank}; raise it"
        )


def _layer(
    folder: Path, name: str, pair: Mapping[str, Tensor], config: _Config, size: LayerSize
) -> LayerWeights:
    rank = pair["A"].shape[0]
    scale = config.lora_alpha / (rank**0.5 if config.use_rslora else rank)
    a, b = pair["A"].to(size.dtype), (pair["B"].float() * scale).to(size.dtype)
    # Infinity or NaN times the zeros of other adapters' tokens would be NaN.
    if not (a.isfinite().all() and b.isfinite().all()):
        raise _rejected(folder, f"{name} has values that are not finite")
    return LayerWeights(a, b)


def _rejected(folder: Path, reason: str) -> RequestError:
    return RequestError("src", f"{folder}: {reason}")
