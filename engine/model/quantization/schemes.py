"""The table of quantized checkpoints: which file reads which `quantization_config`.

To add a format, write a class like those of the other files, and add it to SCHEMES.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from transformers import PreTrainedConfig

from core.errors import ConfigurationError
from engine.model.checkpoint import Checkpoint
from engine.model.quantization.awq import Awq
from engine.model.quantization.compressed_tensors import CompressedTensors
from engine.model.quantization.fine_grained_fp8 import FineGrainedFp8
from engine.model.quantization.gptq import Gptq
from engine.model.quantization.mxfp4 import Mxfp4
from engine.model.quantization.weights import Quantized


class Scheme(Protocol):
    """How a checkpoint stores its quantized layers."""

    markers: tuple[str, ...]
    """A layer is quantized if the checkpoint has a tensor named after it with one of these
    suffixes. Modules that the config ignores have no such tensors."""
    unused_suffixes: tuple[str, ...]
    """Suffixes of tensors that serving does not need, such as static activation scales."""

    def read(self, checkpoint: Checkpoint, name: str) -> Quantized:
        """Take the weight of the quantized layer `name`.

        Raises ConfigurationError if its tensors do not fit together.
        """
        ...


SCHEMES: Mapping[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "fp8": FineGrainedFp8,
    "compressed-tensors": CompressedTensors,
    "awq": Awq,
    "gptq": Gptq,
    "mxfp4": Mxfp4,
}
"""Keyed by `quant_method`. A class raises ValueError, with the reason, for a config it cannot
read."""


def quantization_method(config: PreTrainedConfig) -> str | None:
    """Return the `quant_method` of a model's config; None if its weights are not quantized."""
    given = _quantization_config(config)
    return None if given is None else str(given.get("quant_method", "unknown"))


def read_scheme(config: PreTrainedConfig) -> Scheme | None:
    """Return how a model's checkpoint is quantized, or None if it is not.

    Raises ConfigurationError, which says what would work, if Longshore cannot read the weights.
    """
    given, method = _quantization_config(config), quantization_method(config)
    if given is None or method is None:
        return None
    if method not in SCHEMES:
        raise _unreadable(f"quant_method={method}", f"{', '.join(SCHEMES)} can")
    try:
        return SCHEMES[method](given)
    except ValueError as error:
        raise _unreadable(f"quant_method={method} with {error}", "") from error


def is_quantized(scheme: Scheme, checkpoint: Checkpoint, name: str) -> bool:
    return any(f"{name}{marker}" in checkpoint for marker in scheme.markers)


def _quantization_config(config: Any) -> Mapping[str, Any] | None:
    given = getattr(config, "quantization_config", None)
    return given if given is None or isinstance(given, dict) else given.to_dict()


def _unreadable(what: str, others: str) -> ConfigurationError:
    return ConfigurationError(
        f"config.json: quantization_config has {what}, which cannot be read{others and '; '}"
        f"{others}; serve the unquantized model with option.quantize=fp8, int8 or int4, or set "
        "option.decoder=transformers if the method's library is installed"
    )
