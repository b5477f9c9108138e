"""A model's tensors by name, from memory-mapped safetensors or GGUF files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
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
"""Suffixes of names: constants that older versions of transformers saved beside the weights."""
Entry = tuple[str, Callable[[], Tensor]]
"""A tensor's file, for messages, and the function that reads it."""
MERGED = (".experts.gate_up_proj", ".experts.down_proj")
"""Ends of the names of tensors that have all experts."""
INCOMPLETE = "the download is incomplete, or config.json belongs to another model"
BROKEN = "download the model again"
CURE = "try option.decoder=transformers, which follows transformers' loading rules"


class Checkpoint:
    """Tensors by name. Each can be taken once; those left at the end were not used."""

    def __init__(self, tensors: Mapping[str, Entry], origin: str) -> None:
        """origin: where the tensors come from, for messages."""
        self._tensors = dict(tensors)
        self._origin = origin

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str, *shape: int) -> Tensor:
        """Remove and return a tensor, often a view of a mapped file.

        Raises ConfigurationError if it is missing, unreadable, of another shape or not a float of
        at least 16 bits.
        """
        file, tensor = self._pop(name)
        if tensor.shape != shape:
            raise ConfigurationError(
                f"{file}: tensor '{name}' has shape {list(tensor.shape)}, but config.json implies "
                f"{list(shape)}; {CURE}"
            )
        if not tensor.is_floating_point() or tensor.itemsize == 1:
            raise ConfigurationError(
                f"{file}: tensor '{name}' is {tensor.dtype}, not a float of 16 or 32 bits; "
                "quantized weights need scales, and a quantization_config in config.json"
            )
        return tensor

    def take_stored(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Remove and return a tensor of any shape, often a view of a mapped file.

        dtype: the required one; None: any. Raises ConfigurationError if the tensor is missing,
        unreadable or of another dtype.
        """
        file, tensor = self._pop(name)
        if dtype is not None and tensor.dtype != dtype:
            raise ConfigurationError(
                f"{file}: tensor '{name}' is {tensor.dtype}, but quantization_config in "
                f"config.json implies {dtype}; {BROKEN}"
            )
        return tensor

    def error(self, name: str, problem: str) -> ConfigurationError:
        """Return an error about a tensor that does not fit. problem: such as "has shape [3]"."""
        return ConfigurationError(f"{self._origin}: tensor '{name}' {problem}; {BROKEN}")

    def names(self) -> list[str]:
        """Return the names of the tensors that are still to be taken."""
        return list(self._tensors)

    def keep(self, is_needed: Callable[[str], bool]) -> None:
        """Remove the tensors whose names are not needed; they count as taken."""
        self._tensors = {name: entry for name, entry in self._tensors.items() if is_needed(name)}

    def change(self, name: str, function: Callable[[Tensor], Tensor]) -> None:
        """Replace a tensor that is still to be taken by a function of it."""
        file, read = self._tensors[name]
        self._tensors[name] = file, lambda: function(read())

    def require_all_taken(self, *, except_for: str) -> None:
        """Raise ConfigurationError if a tensor other than `except_for` was never taken."""
        for name, (file, _) in self._tensors.items():
            if name != except_for and not name.endswith(NOT_WEIGHTS):
                raise ConfigurationError(
                    f"{file}: tensor '{name}' belongs to no layer of this model; {CURE}"
                )

    def _pop(self, name: str) -> tuple[str, Tensor]:
        if name not in self._tensors:
            raise ConfigurationError(f"{self._origin} has no tensor '{name}': {INCOMPLETE}")
        file, read = self._tensors.pop(name)
        try:
            return file, read()
        except (SafetensorError, OSError, ValueError) as error:
            raise ConfigurationError(
                f"cannot read '{name}' in {file}: {error}; {BROKEN}"
            ) from error


@dataclass(frozen=True, slots=True)
class Nested:
    """The names of a language model's tensors in the files of a model that has other parts, too."""

    prefix: str
    """What the names begin with, in place of the family's own prefix."""
    head: str | None
    """What precedes the head's own name; None if there is no head, because it is tied."""
    has_transposed_experts: bool = False
    """Whether merged experts are stored as [experts, in, out] (Qwen3-VL)."""

    def renamed(self, name: str, family: Family) -> str | None:
        """Return the name in the language model alone; None if it is no part of it."""
        if name.startswith(self.prefix):
            return family.prefix + name.removeprefix(self.prefix)
        is_head = self.head is not None and name.startswith(f"{self.head}{family.head}.")
        return name.removeprefix(self.head or "") if is_head else None


def find_nested(model_dir: Path, family: Family) -> Nested:
    """Find the language model: the part that has an embedding and layers.

    Raises as `open_checkpoint` does, and UnsupportedModelError if there is not exactly one.
    """
    entries = _entries(model_dir)
    names = list(entries)
    end = f"{family.embedding}.weight"
    ends = (name.removesuffix(end) for name in names if name.endswith(end))
    first = f"{family.layers}.0."
    found = [prefix for prefix in ends if any(name.startswith(prefix + first) for name in names)]
    if len(found) != 1:
        raise UnsupportedModelError(f"its files have {len(found)} language models, not one")
    heads = (name.rpartition(f"{family.head}.weight") for name in names)
    head = next((before for before, own, after in heads if own), None)
    return Nested(found[0], head, _has_transposed_experts(entries, found[0] + end))


def _has_transposed_experts(entries: Mapping[str, Entry], embedding: str) -> bool:
    """Whether the experts' outputs, which are as wide as the embedding, are the last dim."""
    width = entries[embedding][1]().shape[1]
    downs = (read().shape for name, (_, read) in entries.items() if name.endswith(MERGED[1]))
    return any(shape[2] == width != shape[1] for shape in downs)


def open_checkpoint(model_dir: Path, family: Family, nested: Nested | None = None) -> Checkpoint:
    """Open the safetensors files of a model directory, the ones that transformers would read.

    nested: take only the tensors of this language model; None: the files have nothing else.

    Raises UnsupportedModelError if the weights are in another format, ConfigurationError if a file
    is missing or broken.
    """
    entries = _entries(model_dir)
    if nested is not None:
        names = {name: nested.renamed(name, family) for name in entries}
        entries = {own: entries[name] for name, own in names.items() if own is not None}
        if nested.has_transposed_experts:
            entries = {
                name: (file, partial(_transposed, read)) if name.endswith(MERGED) else (file, read)
                for name, (file, read) in entries.items()
            }
    return Checkpoint(_renamed(entries, family), str(model_dir))


def _transposed(read: Callable[[], Tensor]) -> Tensor:
    return read().transpose(1, 2)


def open_published(model_dir: Path) -> Checkpoint:
    """Open the same files as `open_checkpoint`, but keep the tensors' names in the files."""
    return Checkpoint(_entries(model_dir), str(model_dir))


def open_renamed(model_dir: Path, rename: Callable[[str], str | None]) -> Checkpoint:
    """Open the tensors for whose names in the files `rename` returns a name here.

    Raises as `open_checkpoint` does.
    """
    found = {rename(name): entry for name, entry in _entries(model_dir).items()}
    named = {name: entry for name, entry in found.items() if name is not None}
    return Checkpoint(named, str(model_dir))


def checkpoint_of(
    readers: Mapping[str, Callable[[], Tensor]], family: Family, origin: str
) -> Checkpoint:
    """Return a checkpoint of tensors that are not in files, such as random weights.

    readers: by the names of transformers' modules. origin: where the tensors come from, for errors.
    """
    entries = {name: (origin, read) for name, read in readers.items()}
    return Checkpoint(_renamed(entries, family), origin)


def _entries(model_dir: Path) -> dict[str, Entry]:
    from core.files.gguf import GGUF_INDEX

    if (model_dir / GGUF_INDEX).is_file():
        from engine.model.gguf.stored import gguf_entries

        return gguf_entries(model_dir)
    tensors: dict[str, Entry] = {}
    for path in _files(model_dir):
        try:
            file = safe_open(path, "pt")
        except (SafetensorError, OSError) as error:
            raise ConfigurationError(f"cannot read {path}: {error}; {BROKEN}") from error
        for name in file.keys():  # noqa: SIM118 - not a mapping
            tensors[name] = str(path), partial(file.get_tensor, name)
    return tensors


def _files(model_dir: Path) -> list[Path]:
    if (model_dir / SINGLE_FILE).is_file():
        return [model_dir / SINGLE_FILE]
    if not (model_dir / INDEX_FILE).is_file():
        raise UnsupportedModelError(f"it has neither {SINGLE_FILE} nor {INDEX_FILE}")
    try:
        names = json.loads((model_dir / INDEX_FILE).read_text())["weight_map"].values()
        return [model_dir / name for name in sorted(set(names))]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f"cannot read {model_dir / INDEX_FILE}: {error!r}; {BROKEN}"
        ) from error


def _renamed(tensors: dict[str, Entry], family: Family) -> dict[str, Entry]:
    """Rename tensors to the names of transformers' modules.

    Some checkpoints lack the base model's prefix: `wte.weight` for `transformer.wte.weight`.
    """
    for published, own in family.renames:
        tensors = {name.replace(published, own): entry for name, entry in tensors.items()}
    base = family.prefix.partition(".")[0] + "."
    if any(name.startswith(base) for name in tensors):
        return tensors
    return {
        name if name.startswith(family.head) else base + name: entry
        for name, entry in tensors.items()
    }
