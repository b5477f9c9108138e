"""Encode pipeline results as JSON: an image is a base64 PNG file, a sound a base64 WAV file.

Hugging Face's inference API encodes segmentation masks in the same way.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch

from core.configuration.pipeline_tasks import CHAT_TASKS, PIPELINE_TASKS
from engine.tasks.pipelines.sound import write_wav


def postprocessor(task: str) -> Callable[[Any], Any]:
    """Return the function that turns a pipeline result of `task` into its answer."""
    if PIPELINE_TASKS[task].writes_sound:
        return _encode_sound
    return _drop_input_text if task in CHAT_TASKS else lambda result: result


def encode_json(results: object) -> bytes:
    """Encode results as JSON. Raises TypeError for a value that JSON cannot represent."""
    return msgspec.json.encode(results, enc_hook=_to_plain)


def _encode_sound(result: dict[str, Any]) -> dict[str, Any]:
    """Replace the samples by the bytes of a WAV file; `encode_json` makes base64 of them."""
    rate = int(result["sampling_rate"])
    return {"audio": write_wav(np.asarray(result["audio"]), rate), "sampling_rate": rate}


def _drop_input_text(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Drop the input, with its images, from chat results: the client has it."""
    return [{key: result[key] for key in result if key != "input_text"} for result in results]


def _to_plain(value: object) -> object:
    """Convert numpy and torch values to Python's types, and images and 2-D masks to PNG files."""
    if isinstance(value, torch.Tensor) and value.dtype == torch.bool:
        value = value.numpy()
    if isinstance(value, np.ndarray) and value.dtype == bool and value.ndim == 2:
        from PIL import Image

        value = Image.fromarray(value.astype(np.uint8) * 255)
    if isinstance(value, np.generic | np.ndarray | torch.Tensor):
        return value.tolist()
    if _is_image(value):
        return _png(value)
    raise TypeError(
        f"the pipeline answers with {type(value).__name__}, which JSON cannot represent"
    )


def _is_image(value: object) -> bool:
    """Return whether `value` is a Pillow image, without importing Pillow: it is optional."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def _png(image: Any) -> bytes:
    data = io.BytesIO()
    image.save(data, "PNG")
    return data.getvalue()
