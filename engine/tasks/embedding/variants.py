"""LoRA adapters of models that embed texts."""

from __future__ import annotations

from core.configuration.options import Options
from core.errors import ConfigurationError
from core.part import Feature
from engine.encoder.encoder import Encoder
from engine.loading.model_source import ModelSource
from engine.lora.start import start_adapters


def start_variants(
    encoder: Encoder | None, description: str, source: ModelSource, options: Options
) -> tuple[tuple[Feature, ...], tuple[str, ...]]:
    """Attach adapters to our own layers if option.enable_lora is set.

    encoder: our own layers, if they run the model; description says whose do. Return what requests
    may use, and notes. Raises ConfigurationError if transformers' layers run the model, and as
    `start_adapters` does.
    """
    if not options.lora.enable_lora:
        return (), ()
    if encoder is None:
        raise ConfigurationError(
            f"option.enable_lora=true needs Longshore's own layers, but the model runs on "
            f"{description}; leave the option out"
        )
    adapters, note = start_adapters(encoder, source.model_dir, options.lora)
    return (adapters,), (note,)
