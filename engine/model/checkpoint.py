"""A model's tensors by name, out of safetensors files that are mapped into memory, not read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from core.errors import ConfigurationError
from engine.attention.call import UnsupportedModelError
from engine.model.families import Family

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
NOT_WEIGHTS = (
    "rotary_emb.inv_freq",
    "attn.bias",
    "attn.masked_bias",
    "attention.bias",
    "attention.masked_bias",
    "rotary_emb.cos_cached",
    "rotary_emb.sin_cached",
    "act_fn.beta",
    "act_fn.eps",
)
"""Ends of names: constants that older versions of transformers saved beside the weights."""
Entry = tuple[str, Callable[[], Tensor]]
"""The file of a tensor, for messages, and what reads it."""
INCOMPLETE = "the download is incomplete, or config.json is of another model"
BROKEN = "download the model again"
CURE = "option.decoder=transformers loads it by transformers' rules"


class Checkpoint:
    """Each tensor can be taken once; the decoder has no use for one that is left at the end."""

    def __init__(self, tensors: Mapping[str, Entry], origin: str) -> None:
        """tensors: by name. origin: where they are from, for messages."""
        self._tensors = dict(tensors)
        self._origin = origin

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str, *shape: int) -> Tensor:
        """Often a view of a mapped file. Raises ConfigurationError if missing or misshapen."""
        if name not in self._tensors:
            raise ConfigurationError(f"{self._origin} has no tensor '{name}': {INCOMPLETE}")
        file, read = self._tensors.pop(name)
        try:
            tensor = read()
        except (SafetensorError, OSError, ValueError) as error:
            raise ConfigurationError(
                f"cannot read '{name}' in {file}: {error}; {BROKEN}"
            ) from error
        if tensor.shape != shape:
            raise ConfigurationError(
                f"{file}: tensor '{name}' is {list(tensor.shape)}, and by config.json it is "
                f"{list(shape)}; {CURE}"
            )
        if not tensor.is_floating_point():
            raise ConfigurationError(
                f"{file}: tensor '{name}' is {tensor.dtype}, not a float; quantized weights "
                "need a quantization_config in config.json"
            )
        return tensor

    def require_nothing_left(self, *, but: str) -> None:
        """but: a tensor that may be there. Raises ConfigurationError for any other."""
        for name, (file, _) in self._tensors.items():
            if name != but and not name.endswith(NOT_WEIGHTS):
                raise ConfigurationError(
                    f"{file}: tensor '{name}' belongs to no layer of this model; {CURE}"
                )


def open_checkpoint(model_dir: Path, family: Family) -> Checkpoint:
    """The files that transformers would read.

    Raises UnsupportedModelError where the weights are in another form, ConfigurationError where a
    file is missing or broken.
    """
    tensors: dict[str, Entry] = {}
    for path in _files(model_dir):
        try:
            file = safe_open(path, "pt")
        except (SafetensorError, OSError) as error:
            raise ConfigurationError(f"cannot read {path}: {error}; {BROKEN}") from error
        for name in file.keys():  # noqa: SIM118 - it is no mapping
            tensors[name] = str(path), _reader(file, name)
    return Checkpoint(_renamed(tensors, family), str(model_dir))


def checkpoint_of(state: Mapping[str, Tensor], family: Family, origin: str) -> Checkpoint:
    """Of tensors that are in memory already, such as random ones."""

    def reader(tensor: Tensor) -> Callable[[], Tensor]:
        return lambda: tensor

    return Checkpoint(
        _renamed({name: (origin, reader(tensor)) for name, tensor in state.items()}, family), origin
    )


def _files(model_dir: Path) -> list[Path]:
    if (model_dir / SINGLE_FILE).is_file():
        return [model_dir / SINGLE_FILE]
    if not (model_dir / INDEX_FILE).is_file():
        raise UnsupportedModelError(f"its weights are not in {SINGLE_FILE}, nor in shards of it")
    try:
        names = json.loads((model_dir / INDEX_FILE).read_text())["weight_map"].values()
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ConfigurationError(
            f"cannot read {model_dir / INDEX_FILE}: {error!r}; {BROKEN}"
        ) from error
    return [model_dir / name for name in sorted(set(names))]


def _reader(file: safe_open, name: str) -> Callable[[], Tensor]:
    return lambda: file.get_tensor(name)


def _renamed(tensors: dict[str, Entry], family: Family) -> dict[str, Entry]:
    """By the names that transformers' modules have. Some families are published without the first
    word of them: `wte.weight` for `transformer.wte.weight`."""
    for published, own in family.renames:
        tensors = {name.replace(published, own): each for name, each in tensors.items()}
    base = family.prefix.partition(".")[0] + "."
    if any(name.startswith(base) for name in tensors):
        return tensors
    return {
        name if name.startswith(family.head) else base + name: each
        for name, each in tensors.items()
    }
