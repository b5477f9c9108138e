"""LoRA adapters of models that embed or classify texts."""

from __future__ import annotations

from typing import Any

from core.configuration.options import Options
from core.errors import ConfigurationError
from core.part import Feature
from engine.encoder.encoder import Encoder
from engine.loading.model_source import ModelSource
from engine.lora.heads import Heads
from engine.lora.start import start_adapters


def start_variants(
    encoder: Encoder | None,
    source: ModelSource,
    options: Options,
    *,
    obstacle: str,
    classifier: Any = None,
) -> tuple[tuple[Feature, ...], tuple[str, ...]]:
    """Attach adapters to our own layers if option.enable_lora is set.

    encoder: None if they do not run the model, or if the model has no adapters; then `obstacle`
    says why. classifier: transformers' model, for whose head adapters may have their own. Return
    what requests may use, and notes. Raises ConfigurationError as `start_adapters` does, or if
    there is an obstacle.
    """
    if not options.lora.enable_lora:
        return (), ()
    if encoder is None:
        raise ConfigurationError(
            f"option.enable_lora=true: adapters need Longshore's own layers and no sparse vectors, "
            f"but the model has {obstacle}; leave the option out"
        )
    heads = None
    if classifier is not None:
        heads = Heads(classifier, classifier.base_model, lambda: encoder.carried)
    adapters, note = start_adapters(encoder, source.model_dir, options.lora, heads=heads)
    return (adapters,), (note,)
