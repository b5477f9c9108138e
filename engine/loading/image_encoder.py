"""Loads a model that takes images: its language model and its image encoder."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from transformers import AutoModelForImageTextToText

from core.configuration.options import DecoderChoice
from core.errors import ConfigurationError
from core.foreign_code import contained
from engine.attention.call import UnsupportedModelError
from engine.group import Group
from engine.loading.gate import quietly
from engine.loading.model_source import ModelSource
from engine.loading.own_decoder import load_own_decoder
from engine.model.decoder import Decoder
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
    if source.quantization is not None:
        raise UnsupportedModelError("the checkpoint is quantized")
    if group is not None:
        group.require_one("the image encoder")
    family = VISION_FAMILIES[model_type]
    language_model = source.of_language_model()
    config: Any = language_model.config
    config.rope_parameters = {**family.rope, **config.rope_parameters}
    decoder = load_own_decoder(language_model, max_length, phases, group)
    encoder = load_image_encoder(source, family)
    phases.end("image encoder")
    description = f"own ({language_model.config.model_type}), and {model_type}'s image encoder"
    return decoder, description, encoder


def load_image_encoder(source: ModelSource, family: VisionFamily) -> ImageEncoder:
    """Load transformers' model without its language model, and run it once.

    Raises ConfigurationError if its files cannot be read or lack a tensor, if the encoder does not
    run, or if its processor, which the HTTP workers need, cannot be loaded.
    """
    reader = ImageReader(source.model_dir)
    config: Any = deepcopy(source.config)
    text = config.get_text_config()
    text.num_hidden_layers = 0
    if getattr(text, "layer_types", None):
        text.layer_types = []
    try:
        with contained:
            with quietly():
                model, missing = source.with_config(config).load_with_missing(
                    AutoModelForImageTextToText, "sdpa"
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
