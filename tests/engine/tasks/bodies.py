"""Helpers for pipeline requests and for comparing answers with transformers'."""

from __future__ import annotations

import base64
import io
import wave

import av
import numpy as np
import pytest
import torch
from PIL import Image

from core.protocol.task_bodies import PipelineBody
from tests.engine.tasks.models import RATE


def body(inputs, **parameters):
    """Return a request; a list of inputs is a batch."""
    is_batch = isinstance(inputs, list)
    return PipelineBody(inputs if is_batch else [inputs], is_batch, parameters)


def image(color, size=(10, 12)):
    data = io.BytesIO()
    Image.new("RGB", size, color).save(data, "PNG")
    return data.getvalue()


def samples(seed, count):
    """Return a sound as 16-bit integers."""
    return np.random.default_rng(seed).integers(-20_000, 20_000, count, dtype=np.int16)


def wav(seed, count=2000, rate=RATE):
    data = io.BytesIO()
    with wave.open(data, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples(seed, count).tobytes())
    return data.getvalue()


def video(num_frames=6, format="mp4"):
    """Return a video file with distinct frames."""
    data = io.BytesIO()
    with av.open(data, "w", format=format) as file:
        stream = file.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 32, 24, "yuv420p"
        for at in range(num_frames):
            pixels = np.random.default_rng(at).integers(0, 255, (24, 32, 3), dtype=np.uint8)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        file.mux(stream.encode())
    return data.getvalue()


def as_transformers_wants_it(given):
    """Replace file contents by their values, read with other libraries than ours."""
    match given:
        case list():
            return list(map(as_transformers_wants_it, given))
        case dict():
            return {name: as_transformers_wants_it(value) for name, value in given.items()}
        case bytes() if given.startswith(b"RIFF"):
            return np.frombuffer(given[44:], np.int16).astype(np.float32) / 2**15
        case bytes():
            return Image.open(io.BytesIO(given)).convert("RGB")
        case _:
            return given


def with_files_read(answer):
    """Replace base64 files by their pixels and samples."""
    match answer:
        case list():
            return list(map(with_files_read, answer))
        case dict():
            return {name: with_files_read(value) for name, value in answer.items()}
        case str() if answer.startswith("iVBOR"):
            return np.array(Image.open(io.BytesIO(base64.b64decode(answer)))).tolist()
        case str() if answer.startswith("UklGR"):
            return np.frombuffer(base64.b64decode(answer)[44:], np.int16).tolist()
        case _:
            return answer


def plain(result):
    """Return transformers' result as JSON, with pixels instead of images."""
    match result:
        case Image.Image():
            return np.array(result).tolist()
        case np.ndarray() if result.dtype == bool:
            return (result * 255).tolist()
        case np.ndarray() | np.generic() | torch.Tensor():
            return result.tolist()
        case list() | tuple():
            return list(map(plain, result))
        case dict():
            return {name: plain(value) for name, value in result.items()}
        case _:
            return result


def close(got, expected):
    """Return whether values are equal up to rounding, which depends on the rest of a batch."""
    match got:
        case float():
            return got == pytest.approx(expected, abs=1e-5)
        case list():
            return len(got) == len(expected) and all(map(close, got, expected))
        case dict():
            return got.keys() == expected.keys() and all(close(got[k], expected[k]) for k in got)
        case _:
            return got == expected
