"""Loads the adapters found on disk at start."""

from __future__ import annotations

from pathlib import Path

from core.errors import ConfigurationError, LongshoreError
from engine.lora.adapter_registry import AdapterRegistry
from engine.lora.memory import AdapterMemory

DEFAULT_DIRECTORY = "adapters"
MIB = 2**20


def start_adapters(
    memory: AdapterMemory, model_dir: Path, directory: str | None
) -> tuple[AdapterRegistry, tuple[str, ...]]:
    """Load the adapters in a directory into `memory`, and return them with a note for the log.

    directory: that of option.adapters. Raises ConfigurationError if it does not exist, or if one of
    its adapters cannot be loaded.
    """
    adapters = AdapterRegistry(memory)
    for folder in _adapter_folders(model_dir, directory):
        try:
            adapters.load(folder.name, str(folder))
        except LongshoreError as error:
            raise ConfigurationError(f"adapter '{folder.name}': {error}") from error
    names = ", ".join(adapter.name for adapter in adapters.loaded) or "none yet"
    return adapters, (
        f"LoRA: room for {memory.num_slots} adapters of rank {memory.max_rank} takes "
        f"{memory.num_bytes / MIB:,.1f} MiB; loaded: {names}",
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
