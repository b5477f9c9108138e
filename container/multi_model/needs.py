"""What a model needs at least, as far as its files tell before it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from container.capacity.decoder import Decoder, decoder_in
from container.capacity.plan import adapter_bytes, kv_itemsize, weights_bytes
from container.configuration.resolve import load_configuration
from container.models.directory import named_path, open_model_dir, properties_beside
from core.errors import ConfigurationError
from core.options import Options
from core.sizing import bytes_per_block


@dataclass(frozen=True, slots=True)
class Needs:
    """Of one model."""

    gpu_share: float
    """option.gpu_memory_utilization."""
    may_use_gpu: bool
    least_bytes: int
    """Of weights, and of adapters and KV memory as far as the options fix them; 0 where the files
    do not tell."""


def needs_of(url: Path, variables: Mapping[str, str]) -> Needs:
    """Unpacks an archive. Raises ConfigurationError where the configuration is wrong."""
    model_dir = open_model_dir(url)
    configuration = load_configuration(properties_beside(model_dir), variables)
    options, least_bytes = configuration.options, 0
    # What is not sized here, or not even right, is for the engine to judge.
    with suppress(ConfigurationError, OSError, ValueError, TypeError, KeyError, AttributeError):
        decoder = decoder_in(open_model_dir(named_path(configuration, model_dir)), options)
        least_bytes = weights_bytes(decoder) + _fixed_kv_bytes(decoder, options)
        least_bytes += adapter_bytes(decoder, options)
    return Needs(options.gpu_memory_utilization, options.device != "cpu", least_bytes)


def visible_gpus(variables: Mapping[str, str], devices: Path = Path("/dev")) -> tuple[str, ...]:
    """As CUDA_VISIBLE_DEVICES names them; all that NVIDIA's driver shows where that is not set."""
    chosen = variables.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return tuple(map(str, range(len(list(devices.glob("nvidia[0-9]*"))))))
    return tuple(each.strip() for each in chosen.split(",") if each.strip() not in ("", "-1"))


def _fixed_kv_bytes(decoder: Decoder, options: Options) -> int:
    if options.num_kv_blocks is None:
        return options.kv_cache_memory_bytes or 0
    itemsize = kv_itemsize(decoder, options)
    return options.num_kv_blocks * bytes_per_block(decoder.shapes, options.block_size, itemsize)
