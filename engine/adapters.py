"""What the options say of adapters, at start: room for them, and those to load at once."""

from __future__ import annotations

from pathlib import Path

from core.errors import ConfigurationError, LongshoreError
from core.options import Options
from engine.attention.call import UnsupportedModelError
from engine.loading.packed_model import PackedModel
from engine.lora.adapters import Adapters
from engine.step.library_executor import LibraryModel

DEFAULT_DIRECTORY = "adapters"
MIB = 2**20


def start_adapters(
    model_dir: Path, options: Options, model: PackedModel | LibraryModel, executor_reason: str
) -> tuple[Adapters | None, tuple[str, ...]]:
    """None where adapters are not enabled; and a note on what was reserved and loaded.

    Raises ConfigurationError where the model cannot have adapters, or one cannot be loaded.
    """
    if not options.enable_lora:
        if options.adapters is not None:
            raise ConfigurationError("option.adapters needs option.enable_lora=true")
        return None, ()
    if isinstance(model, LibraryModel):
        raise ConfigurationError(
            f"option.enable_lora needs the packed executor, but {executor_reason}; merge the "
            "adapter into the model, and leave option.enable_lora out"
        )
    try:
        memory = model.adapt(options.max_loras, options.max_lora_rank)
    except UnsupportedModelError as error:
        raise ConfigurationError(f"option.enable_lora: {error}") from error
    adapters = Adapters(memory)
    for folder in _folders(model_dir, options):
        try:
            adapters.load(folder.name, str(folder))
        except LongshoreError as error:
            raise ConfigurationError(f"adapter '{folder.name}': {error}") from error
    names = ", ".join(each.name for each in adapters.loaded) or "none yet"
    return adapters, (
        f"LoRA: {memory.num_slots} adapters of rank {memory.max_rank} take "
        f"{memory.num_bytes / MIB:,.1f} MiB; loaded: {names}",
    )


def _folders(model_dir: Path, options: Options) -> list[Path]:
    """Of the adapters to load, by name."""
    directory = model_dir / (options.adapters or DEFAULT_DIRECTORY)
    if not directory.is_dir():
        if options.adapters is not None:
            raise ConfigurationError(f"option.adapters={options.adapters}: no such directory")
        return []
    return sorted(
        each for each in directory.iterdir() if each.is_dir() and not each.name.startswith(".")
    )
