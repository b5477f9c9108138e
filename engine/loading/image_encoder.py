"""Loads the image encoder of a model that takes images."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from transformers import AutoModelForImageTextToText

from core.errors import ConfigurationError
from core.foreign_code import contained
from engine.loading.gate import quietly
from engine.loading.model_source import ModelSource
from engine.vision.encoder import BLANK_PIXELS, ImageEncoder
from engine.vision.families import VisionFamily
from engine.vision.reader import ImageReader


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
            encoder.run_blank(BLANK_PIXELS)
    except Exception as error:  # transformers' code and the weight files may raise anything
        raise ConfigurationError(
            f"transformers cannot run the image encoder of {source.model_dir}: {error}"
        ) from error
    if missing:
        raise ConfigurationError(f"{source.model_dir} has no tensor '{missing[0]}'")
    return encoder
