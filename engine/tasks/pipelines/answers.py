"""Answers of pipelines as JSON: an image is a PNG file in base64, a sound a WAV file in base64.

So does Hugging Face's inference API with the masks of image segmentation.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch

from core.pipeline_tasks import CHAT_TASKS, PIPELINE_TASKS
from engine.tasks.pipelines.sound import write_wav


def answers_of(task: str) -> Callable[[Any], Any]:
    """What is done to the results of a task's pipeline."""
    if PIPELINE_TASKS[task].writes_sound:
        return _sound
    return _texts if task in CHAT_TASKS else lambda result: result


def encoded(results: object) -> bytes:
    """JSON. Raises TypeError where there is no way to say it."""
    return msgspec.json.encode(results, enc_hook=_plain)


def _sound(result: dict[str, Any]) -> dict[str, Any]:
    """The bytes of a WAV file, which `encoded` makes base64."""
    rate = int(result["sampling_rate"])
    return {"audio": write_wav(np.asarray(result["audio"]), rate), "sampling_rate": rate}


def _texts(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the input, images and all, which the client has."""
    return [{key: each[key] for key in each if key != "input_text"} for each in results]


def _plain(value: object) -> object:
    """Numbers and arrays of numpy and torch as Python's own; images, and masks, as PNG files."""
    if isinstance(value, torch.Tensor) and value.dtype == torch.bool:
        value = value.numpy()
    if isinstance(value, np.ndarray) and value.dtype == bool and value.ndim == 2:
        from PIL import Image

        value = Image.fromarray(value.astype(np.uint8) * 255)
    if isinstance(value, np.generic | np.ndarray | torch.Tensor):
        return value.tolist()
    if _is_image(value):
        return _png(value)
    raise TypeError(f"the pipeline answers with {type(value).__name__}, which is no JSON")


def _is_image(value: object) -> bool:
    """Of Pillow's, which need not be there."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def _png(image: Any) -> bytes:
    data = io.BytesIO()
    image.save(data, "PNG")
    return data.getvalue()
