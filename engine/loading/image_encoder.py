"""Loads a model that takes images: its language model and its image encoder."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from torch import Tensor
from transformers import AutoModelForImageTextToText

from core.configuration.options import DecoderChoice
from core.errors import ConfigurationError
from core.foreign_code import contained
from engine.attention.call import UnsupportedModelError
from engine.group import Group
from engine.loading.gate import quietly
from engine.loading.model_source import ModelSource
from engine.loading.own_decoder import load_own_decoder
from engine.model.checkpoint import open_published
from engine.model.decoder import Decoder
from engine.model.families import FAMILIES
from engine.phases import Phases
from engine.vision.encoder import ImageEncoder
from engine.vision.families import VISION_FAMILIES, VisionFamily
from engine.vision.reader import ImageReader


def load_vision_model(
    source: ModelSource,
    max_length: int,
    choice: DecoderChoice,
    phases: Phases,
    group: Group | None,
) -> tuple[Decoder, str, ImageEncoder]:
    """Load a model that takes images: its decoder, a description of it, and its encoder.

    Raises as `load_packed_model` does, and UnsupportedModelError if it cannot take images here.
    """
    model_type = source.config.model_type
    if choice == "transformers":
        raise UnsupportedModelError("option.decoder=transformers cannot embed them")
    family = VISION_FAMILIES[model_type]
    language_model = source.of_language_model()
    config: Any = language_model.config
    config.rope_parameters = {**family.rope, **config.rope_parameters}
    decoder = load_own_decoder(language_model, max_length, phases, group)
    state = None if source.quantization is None else _dequantized(source, language_model)
    encoder = load_image_encoder(source, family, state)
    phases.end("image encoder")
    description = f"own ({language_model.config.model_type}), and {model_type}'s image encoder"
    return decoder, description, encoder


def load_image_encoder(
    source: ModelSource, family: VisionFamily, state: Mapping[str, Tensor] | None
) -> ImageEncoder:
    """Load transformers' model without its language model, and run it once.

    state: tensors to use instead of quantized ones in the files.

    Raises ConfigurationError if its files cannot be read or lack a tensor, if the encoder does not
    run, or if its processor, which the HTTP workers need, cannot be loaded.
    """
    reader = ImageReader(source.model_dir)
    config: Any = deepcopy(source.config)
    if state is not None:
        del config.quantization_config
    text = config.get_text_config()
    text.num_hidden_layers = 0
    if getattr(text, "layer_types", None):
        text.layer_types = []
    try:
        with contained:
            with quietly():
                model, missing = source.with_config(config).load_with_missing(
                    AutoModelForImageTextToText, "sdpa", state
                )
            setattr(model.model, family.module, None)  # drop what is left of the language model
            encoder = ImageEncoder(model.model.to(source.device).eval(), reader.blank)
    except Exception as error:  # transformers' code and the weight files may raise anything
        raise ConfigurationError(
            f"transformers cannot run the image encoder of {source.model_dir}: {error}"
        ) from error
    if missing:
        raise ConfigurationError(f"{source.model_dir} has no tensor '{missing[0]}'")
    return encoder


def _dequantized(source: ModelSource, language_model: ModelSource) -> dict[str, Tensor]:
    """Return all tensors but those of the language model's layers, by their names in the files."""
    from engine.loading.dequantized import dequantized
    from engine.model.quantization.schemes import read_scheme

    scheme, nested = read_scheme(source.config), language_model.nested
    assert scheme is not None
    assert nested is not None, "only files are quantized"
    layers = f"{nested.prefix}{FAMILIES[language_model.config.model_type].layers}."
    unused = scheme.unused_suffixes
    checkpoint = open_published(source.model_dir)
    checkpoint.keep(lambda name: not name.startswith(layers) and not name.endswith(unused))
    return dequantized(checkpoint, scheme, num_experts=1)
