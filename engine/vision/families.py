"""The models that take images: what differs between their checkpoints and processors.

Each has a language model that runs packed, and an image encoder whose outputs replace the
embeddings of the image tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """One row of the table."""

    processor: Literal["tiles", "grid", "runs", "rows", "crops"]
    """See `engine.vision.processors`, which is imported only for models that take images."""
    module: str = "language_model"
    """The language model's name in transformers' model."""
    rope: Mapping[str, Any] = field(default_factory=dict)
    """Rotary parameters of the language model that its config may leave out."""


GLM = VisionFamily("grid", rope={"mrope_section": [8, 12, 12]})
QWEN3 = VisionFamily("grid", rope={"mrope_interleaved": True, "mrope_section": [24, 20, 20]})

VISION_FAMILIES: dict[str, VisionFamily] = {
    "gemma3": VisionFamily("runs"),
    "idefics3": VisionFamily("tiles", module="text_model"),
    "smolvlm": VisionFamily("tiles", module="text_model"),
    "qwen2_vl": VisionFamily("grid"),
    "qwen2_5_vl": VisionFamily("grid"),
    "qwen3_vl": QWEN3,
    "qwen3_vl_moe": QWEN3,
    "glm4v": GLM,
    "glm4v_moe": GLM,
    "glm46v": GLM,
    "internvl": VisionFamily("crops"),
    "mistral3": VisionFamily("rows"),
}
"""Keyed by `model_type` in config.json."""
