"""Decides what option.quantize means: quantize at load, or just confirm the checkpoint's format."""

from __future__ import annotations

from transformers import PreTrainedConfig

from core.errors import ConfigurationError
from engine.model.quantization.at_load import QUANTIZERS
from engine.model.quantization.schemes import quantization_method


def choose_precision(quantize: str | None, config: PreTrainedConfig) -> str | None:
    """Return the precision to quantize to at load, a key of QUANTIZERS, or None.

    quantize: the option's value. Raises ConfigurationError if it contradicts the checkpoint.
    """
    method = quantization_method(config)
    if quantize in (None, method):
        return None
    if method is not None:
        raise ConfigurationError(
            f"option.quantize={quantize}: the checkpoint is already quantized "
            f"(quant_method={method} in config.json); leave the option out"
        )
    if quantize not in QUANTIZERS:
        raise ConfigurationError(
            f"option.quantize={quantize}: the checkpoint is not quantized (config.json has no "
            "quantization_config); to quantize it while it is loaded, use one of "
            f"{', '.join(QUANTIZERS)}"
        )
    return quantize
