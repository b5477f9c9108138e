"""The models that take images: what differs between their checkpoints and processors.

Each has a language model that runs packed, and an image encoder whose outputs replace the
embeddings of the image tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """One row of the table."""

    processor: Literal["tiles", "grid", "runs"]
    """See `engine.vision.processors`, which is imported only for models that take images."""
    module: str = "language_model"
    """The language model's name in transformers' model."""


VISION_FAMILIES: dict[str, VisionFamily] = {
    "gemma3": VisionFamily("runs"),
    "idefics3": VisionFamily("tiles", module="text_model"),
    "smolvlm": VisionFamily("tiles", module="text_model"),
    "qwen2_vl": VisionFamily("grid"),
    "qwen2_5_vl": VisionFamily("grid"),
}
"""Keyed by `model_type` in config.json."""
