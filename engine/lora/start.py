"""Loads the adapters found on disk at start."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from core.configuration.options import LoraOptions
from core.errors import ConfigurationError, LongshoreError
from engine.lora.adapter_registry import AdapterRegistry
from engine.lora.column import AdapterColumn
from engine.lora.heads import Heads
from engine.lora.memory import Adaptable, AdapterMemory
from engine.step.column import PerTokenColumn


class AdaptableModel(Protocol):
    """A model that can have adapters, such as `engine.loading.packed_model.PackedModel`."""

    device: torch.device
    columns: list[PerTokenColumn]

    @property
    def linears(self) -> Sequence[Adaptable]: ...


DEFAULT_DIRECTORY = "adapters"
MIB = 2**20


@torch.inference_mode()
def start_adapters(
    model: AdaptableModel,
    model_dir: Path,
    options: LoraOptions,
    *,
    is_pinned: bool = False,
    heads: Heads | None = None,
) -> tuple[AdapterRegistry, str]:
    """Attach adapter slots to the model's linear layers, and load the adapters on disk.

    Return them with a note for the log. is_pinned, heads: as in `AdapterMemory`. Call it at most
    once for a model. Raises ConfigurationError if no layer can take adapters, option.adapters does
    not exist, or an adapter cannot be loaded.
    """
    if not model.linears:
        raise ConfigurationError(
            "option.enable_lora: it has no linear layers that see each token once"
        )
    memory = AdapterMemory(
        model.linears,
        options.max_loras,
        options.max_lora_rank,
        model.device,
        is_pinned=is_pinned,
        heads=heads,
    )
    model.columns.append(AdapterColumn(memory))
    adapters = AdapterRegistry(memory)
    for folder in _adapter_folders(model_dir, options.adapters):
        try:
            adapters.load(folder.name, str(folder))
        except LongshoreError as error:
            raise ConfigurationError(f"adapter '{folder.name}': {error}") from error
    names = ", ".join(adapter.name for adapter in adapters.loaded) or "none yet"
    return adapters, (
        f"LoRA: room for {memory.num_slots} adapters of rank {memory.max_rank} takes "
        f"{memory.num_bytes / MIB:,.1f} MiB; loaded: {names}"
    )


def _adapter_folders(model_dir: Path, given: str | None) -> list[Path]:
    """Return the folders of the adapters to load, sorted by name."""
    directory = model_dir / (given or DEFAULT_DIRECTORY)
    if not directory.is_dir():
        if given is not None:
            raise ConfigurationError(f"option.adapters={given}: no such directory")
        return []
    return sorted(
        folder
        for folder in directory.iterdir()
        if folder.is_dir() and not folder.name.startswith(".")
    )
