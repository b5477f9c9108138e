"""Reads an adapter in PEFT's format: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
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
_SAVED = re.compile(r"^base_model\.model\.|\.modules_to_save(\.default)?(?=\.)")
"""What PEFT's versions add to the names of modules that they save whole."""
_CLASSIFIERS = ("classifier", "score")
"""What PEFT adds to modules_to_save of any model that classifies, whichever the model has."""
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
    head: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Tensors of the classification head that the adapter has of its own, by name."""
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


def read_adapter(
    folder: Path,
    sizes: Mapping[str, LayerSize],
    max_rank: int,
    head: Mapping[str, Tensor] = MappingProxyType({}),
) -> AdapterWeights:
    """Read and check an adapter.

    sizes: layers that can be adapted, by name. head: the model's tensors in whose place the adapter
    may have its own, by name.

    Raises RequestError with field `src` if the folder holds no adapter, an unsupported one or one
    for another model.
    """
    config = _read_config(folder, head)
    tensors = _read_tensors(folder)
    own_head = _take_head(folder, tensors, config.modules_to_save or (), head)
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
        raise _rejected(folder, f"{WEIGHTS} holds no tensors of LoRA")
    for name, pair in sides.items():
        _check_layer(folder, name, pair, sizes, max_rank)
    layers = {name: _layer(folder, name, pair, config, sizes[name]) for name, pair in sides.items()}
    return AdapterWeights(layers, own_head, digest_files([folder / CONFIG, folder / WEIGHTS])[:12])


def _read_config(folder: Path, head: Mapping[str, Tensor]) -> _Config:
    try:
        config = msgspec.json.decode((folder / CONFIG).read_bytes(), type=_Config)
    except OSError as error:
        raise _rejected(folder, f"{CONFIG} cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise _rejected(folder, f"{CONFIG}: {error}") from None
    saved = [
        module
        for module in config.modules_to_save or ()
        if not (head and module in _CLASSIFIERS) and not any(_is_in(name, module) for name in head)
    ]
    unsupported = {
        f"peft_type {config.peft_type}": config.peft_type != "LORA",
        "DoRA (use_dora)": config.use_dora,
        "biases (bias, lora_bias)": config.bias != "none" or config.lora_bias,
        f"modules_to_save={saved}": saved,
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


def _is_in(name: str, module: str) -> bool:
    """Return whether a tensor is one of the modules that modules_to_save names so."""
    return f".{module}." in f".{name}"


def _take_head(
    folder: Path, tensors: dict[str, Tensor], saved: Sequence[str], head: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """Remove and return the tensors in place of the model's own head.

    saved: modules_to_save, which older PEFT leaves out though it saves the classifier. Raises
    RequestError if a module is not there whole, or for another number of labels.
    """
    names = {key: name for key in tensors if (name := _SAVED.sub("", key)) in head}
    taken = {name: tensors.pop(key) for key, name in names.items()}
    begun = {name.rpartition(".")[0] for name in taken}
    for name, own in head.items():
        if name not in taken:
            if name.rpartition(".")[0] in begun or any(_is_in(name, module) for module in saved):
                raise _rejected(folder, f"{WEIGHTS} lacks {name}, a part of the head; save it anew")
            continue
        if taken[name].shape != own.shape:
            given, wanted = ([*tensor.shape] for tensor in (taken[name], own))
            raise _rejected(
                folder,
                f"{name} is {given}, but the model's is {wanted}: save the model with the "
                "adapter's num_labels, or merge the adapter into the model it was made for",
            )
        # Not a view of the file, which may be written anew while the adapter is in use.
        taken[name] = taken[name].to(own.device, own.dtype).clone()
        if not taken[name].isfinite().all():
            raise _rejected(folder, f"{name} has values that are not finite")
    return taken


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
