"""Videos as models take them: some of their frames, as pixels."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers.pipelines.video_classification import VideoClassificationPipeline

from core.errors import RequestError

MAX_PIXELS = 4096 * 2304
"""Of a frame. What a file of kilobytes unfolds to is many times as much."""
_CONTAINERS = "mov,mp4,matroska,webm,avi,mpegts"
"""Formats that hold their pictures themselves: a playlist would have files and addresses opened."""


class FramesPipeline(VideoClassificationPipeline):
    """transformers' own, but for what it is given: `read_video`'s frames, for the name of a file.

    Raises ValueError where the model has no image processor.
    """

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        if self.image_processor is None:
            raise ValueError("the model has no image processor (preprocessor_config.json)")

    def preprocess(self, video: Any, num_frames: Any = None, frame_sampling_rate: Any = 1) -> Any:
        assert self.image_processor is not None
        return self.image_processor(list(video), return_tensors="pt").to(self.dtype)


def read_video(data: object, num_frames: int, frame_sampling_rate: int) -> NDArray[np.uint8]:
    """[num_frames, height, width, 3], those that transformers' pipeline takes: the first ones, with
    `frame_sampling_rate - 1` left out between two.

    Raises RequestError where it is no video, has too few frames or too large ones.
    """
    import av  # there, as the start has seen to
    from av.error import FFmpegError

    if not isinstance(data, bytes):  # a text would be a path
        raise RequestError("inputs", "expected the bytes of a video")
    last = num_frames * frame_sampling_rate - 1
    wanted = set(np.linspace(0, last, num_frames, dtype=np.int64).tolist())
    frames: list[NDArray[np.uint8]] = []
    options = {"format_whitelist": _CONTAINERS, "protocol_whitelist": "none"}
    try:
        with av.open(io.BytesIO(data), "r", options=options) as file:
            for at, frame in enumerate(file.decode(video=0)):
                if frame.width * frame.height > MAX_PIXELS:
                    raise RequestError("inputs", f"its frames have more than {MAX_PIXELS} pixels")
                if at in wanted:
                    frames.append(np.asarray(frame.to_ndarray(format="rgb24"), np.uint8))
                if at >= last:
                    break
    except (FFmpegError, IndexError, ValueError):
        raise RequestError("inputs", "is no video of a known format, or not a whole one") from None
    if len(frames) < num_frames:
        raise RequestError("inputs", f"is too short: the model takes {last + 1} frames of it")
    return np.stack(frames)
