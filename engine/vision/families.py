"""The models that take images: what differs between their checkpoints and processors.

Each has a language model that runs packed, and an image encoder whose outputs replace the
embeddings of the image tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """One row of the table. The names are as in transformers' modules."""

    language_model: str
    """Prefix of the language model's tensors in published files."""
    processor: Literal["tiles", "grid", "runs"]
    """See `engine.vision.processors`, which is imported only for models that take images."""
    model_type: str = ""
    """The family in `engine.model.families` that computes the language model; '': the model type
    in its config."""
    module: str = "language_model"
    """The language model's name in transformers' model."""


IDEFICS3 = VisionFamily("model.text_model.", "tiles", module="text_model")
QWEN2_VL = VisionFamily("model.language_model.", "grid", "qwen2")

VISION_FAMILIES: dict[str, VisionFamily] = {
    "gemma3": VisionFamily("language_model.model.", "runs"),
    "idefics3": IDEFICS3,
    "smolvlm": IDEFICS3,
    "qwen2_vl": QWEN2_VL,
    "qwen2_5_vl": QWEN2_VL,
}
"""Keyed by `model_type` in config.json."""
