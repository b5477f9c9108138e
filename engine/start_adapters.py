"""Prepares a model for LoRA at start: reserves memory and loads the adapters found on disk."""

from __future__ import annotations

from pathlib import Path

from core.configuration.options import Options
from core.errors import ConfigurationError, LongshoreError
from engine.attention.call import UnsupportedModelError
from engine.loading.packed_model import PackedModel
from engine.lora.adapter_registry import AdapterRegistry
from engine.step.library_executor import LibraryModel

DEFAULT_DIRECTORY = "adapters"
MIB = 2**20


def start_adapters(
    model_dir: Path, options: Options, model: PackedModel | LibraryModel, executor_reason: str
) -> tuple[AdapterRegistry | None, tuple[str, ...]]:
    """Return the adapters (None if LoRA is not enabled) and notes for the log.

    Raises ConfigurationError if the model does not support LoRA or an adapter cannot be loaded.
    """
    if not options.lora.enable_lora:
        if options.lora.adapters is not None:
            raise ConfigurationError("option.adapters needs option.enable_lora=true")
        return None, ()
    if isinstance(model, LibraryModel):
        raise ConfigurationError(
            f"option.enable_lora needs the packed executor, but {executor_reason}; merge the "
            "adapter into the model, and leave option.enable_lora out"
        )
    try:
        memory = model.enable_adapters(options.lora.max_loras, options.lora.max_lora_rank)
    except UnsupportedModelError as error:
        raise ConfigurationError(f"option.enable_lora: {error}") from error
    adapters = AdapterRegistry(memory)
    for folder in _adapter_folders(model_dir, options):
        try:
            adapters.load(folder.name, str(folder))
        except LongshoreError as error:
            raise ConfigurationError(f"adapter '{folder.name}': {error}") from error
    names = ", ".join(adapter.name for adapter in adapters.loaded) or "none yet"
    return adapters, (
        f"LoRA: room for {memory.num_slots} adapters of rank {memory.max_rank} takes "
        f"{memory.num_bytes / MIB:,.1f} MiB; loaded: {names}",
    )


def _adapter_folders(model_dir: Path, options: Options) -> list[Path]:
    """Return the folders of the adapters to load, sorted by name."""
    directory = model_dir / (options.lora.adapters or DEFAULT_DIRECTORY)
    if not directory.is_dir():
        if options.lora.adapters is not None:
            raise ConfigurationError(f"option.adapters={options.lora.adapters}: no such directory")
        return []
    return sorted(
        folder
        for folder in directory.iterdir()
        if folder.is_dir() and not folder.name.startswith(".")
    )
