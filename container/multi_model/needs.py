"""Estimates a model's memory needs from its files, before it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from container.capacity.decoder import Decoder, decoder_from_directory
from container.capacity.draft import with_draft
from container.capacity.estimate import draft_block_bytes, kv_itemsize, loaded_bytes
from container.model_files.directory import model_place, open_model_dir
from container.model_files.gguf import model_directory
from container.multi_model.overrides import Overrides
from core.configuration.kv_layout import KVLayout, bytes_per_block
from core.configuration.layout import require_one_engine
from core.configuration.options import Options
from core.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Needs:
    """The memory needs of a model."""

    gpu_share: float
    """option.gpu_memory_utilization."""
    may_use_gpu: bool
    min_bytes: int
    """Bytes for what is loaded, and for the KV cache if the options fix its size. 0 if unknown."""


def estimate_needs(url: Path, variables: Mapping[str, str], overrides: Overrides) -> Needs:
    """Estimate the needs of a model. Raises ConfigurationError if its configuration is invalid."""
    model_dir = open_model_dir(url)
    configuration = overrides.load(model_dir, variables)
    options, min_bytes = configuration.options, 0
    require_one_engine(options, "a model that shares the port with other models")
    # If the size is unknown or config.json is invalid, leave the error to the engine.
    with suppress(ConfigurationError, OSError, ValueError, TypeError, KeyError, AttributeError):
        path = open_model_dir(model_place(configuration, model_dir).path)
        directory = model_directory(path)
        decoder = decoder_from_directory(directory, options)
        min_bytes = _bytes(decoder, options)
        min_bytes = _bytes(with_draft(decoder, directory, options), options)
    return Needs(
        options.memory.gpu_memory_utilization, options.execution.device != "cpu", min_bytes
    )


def _bytes(decoder: Decoder, options: Options) -> int:
    return loaded_bytes(decoder, options) + _fixed_kv_bytes(decoder, options)


def _fixed_kv_bytes(decoder: Decoder, options: Options) -> int:
    if options.memory.num_kv_blocks is None:
        return options.memory.kv_cache_memory_bytes or 0
    itemsize = kv_itemsize(decoder, options)
    block_size = options.memory.block_size
    per_block = bytes_per_block(decoder.shapes, block_size, itemsize)
    per_block += draft_block_bytes(decoder, options, KVLayout.uniform(block_size))
    return options.memory.num_kv_blocks * per_block
