"""The `Dense` modules of sentence-transformers: linear layers after the pooling."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from core.errors import ConfigurationError
from engine.loading.model_source import SEED, ModelSource
from engine.model.checkpoint import SINGLE_FILE, Checkpoint
from engine.model.loader import Loader, Source

_LAYER = "linear"
_POOLED = "sentence_embedding"
_ACTIVATIONS: Mapping[str, type[nn.Module]] = {
    kind.__name__: kind for kind in (nn.Identity, nn.Tanh, nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid)
}


class _Config(msgspec.Struct):
    """config.json of such a module."""

    in_features: int
    out_features: int
    bias: bool = True
    activation_function: str = "torch.nn.modules.activation.Tanh"
    module_input_name: str = _POOLED
    module_output_name: str | None = None
    use_residual: bool = False


class DenseModule:
    """Maps vectors [texts, in] in fp32 to [texts, out]."""

    def __init__(self, folder: Path, width: int, source: ModelSource) -> None:
        """folder: that of the module. width: numbers of the vectors that it gets.

        Raises ConfigurationError if a file is missing or broken, if the module does something else
        than a linear layer and an activation, or if it takes vectors of another width.
        """
        config = _read_config(folder)
        if config.in_features != width:
            raise ConfigurationError(
                f"{folder}: the layer takes {config.in_features} numbers, but the pooled vectors "
                f"have {width}; leave out option.pooling, or correct the pooling's config.json"
            )
        tensors = _read_tensors(folder, config, is_random=source.is_dummy)
        entries = {name: (str(folder), tensors[name].detach) for name in tensors}
        loader = Loader(Checkpoint(entries, str(folder)), source.device, torch.float32)
        layer = Source(_LAYER, config.out_features)
        self._linear = loader.linear([layer], width, is_adaptable=False)
        self._activate = _ACTIVATIONS[_class_name(config)]()
        self.width = config.out_features

    def __call__(self, vectors: Tensor) -> Tensor:
        return self._activate(self._linear(vectors))


def _read_config(folder: Path) -> _Config:
    path = folder / "config.json"
    try:
        config = msgspec.json.decode(path.read_bytes(), type=_Config)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigurationError(f"cannot read {path}: {error}") from None
    unsupported = {
        f"activation_function={config.activation_function}": _class_name(config)
        not in _ACTIVATIONS,
        "use_residual": config.use_residual,
        f"module_input_name={config.module_input_name}": config.module_input_name != _POOLED,
        f"module_output_name={config.module_output_name}": (config.module_output_name or _POOLED)
        != _POOLED,
    }
    for setting, is_used in unsupported.items():
        if is_used:
            raise ConfigurationError(
                f"{path}: this version does not support {setting}; serve the model with a model.py "
                "that uses sentence-transformers"
            )
    return config


def _class_name(config: _Config) -> str:
    return config.activation_function.rpartition(".")[2]


def _read_tensors(folder: Path, config: _Config, *, is_random: bool) -> Mapping[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {
        f"{_LAYER}.weight": (config.out_features, config.in_features)
    }
    if config.bias:
        shapes[f"{_LAYER}.bias"] = (config.out_features,)
    if is_random:
        generator = torch.Generator().manual_seed(SEED)
        scale = config.in_features**-0.5
        return {
            name: torch.randn(shape, generator=generator) * scale for name, shape in shapes.items()
        }
    path = folder / SINGLE_FILE
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigurationError(
            f"cannot read {path}: {error}; save the model again with a current "
            "sentence-transformers"
        ) from None
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if found != shapes:
        raise ConfigurationError(
            f"{path} has {found}, but config.json implies {shapes}; download the model again"
        )
    return tensors
