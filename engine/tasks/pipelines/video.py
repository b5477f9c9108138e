"""Decode the frames that a model needs from a video."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers.pipelines.video_classification import VideoClassificationPipeline

from core.errors import RequestError

MAX_PIXELS = 4096 * 2304
"""Limit on the pixels of a frame: a file of a few kilobytes may unpack to many more."""
_CONTAINERS = "mov,mp4,matroska,webm,avi,mpegts"
"""Formats that contain their frames; a playlist would make FFmpeg open files and URLs."""


class FramesPipeline(VideoClassificationPipeline):
    """transformers' pipeline, with the frames of `read_video` as input instead of a file name.

    Raises ValueError if the model has no image processor.
    """

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        if self.image_processor is None:
            raise ValueError("the model has no image processor (preprocessor_config.json)")

    def preprocess(self, video: Any, num_frames: Any = None, frame_sampling_rate: Any = 1) -> Any:
        assert self.image_processor is not None
        return self.image_processor(list(video), return_tensors="pt").to(self.dtype)


def read_video(data: object, num_frames: int, frame_sampling_rate: int) -> NDArray[np.uint8]:
    """Return `num_frames` frames [num_frames, height, width, 3] from the start of a video.

    Takes the frames that transformers' pipeline takes: about every `frame_sampling_rate`-th one.
    Raises RequestError if it is not a video, or has too few frames or too large ones.
    """
    import av  # start-up checked that it is installed
    from av.error import FFmpegError

    if not isinstance(data, bytes):  # a str would be a path
        raise RequestError("inputs", "expected the bytes of a video")
    last = num_frames * frame_sampling_rate - 1
    wanted = set(np.linspace(0, last, num_frames, dtype=np.int64).tolist())
    frames: list[NDArray[np.uint8]] = []
    options = {"format_whitelist": _CONTAINERS, "protocol_whitelist": "none"}
    try:
        with av.open(io.BytesIO(data), "r", options=options) as file:
            for index, frame in enumerate(file.decode(video=0)):
                if frame.width * frame.height > MAX_PIXELS:
                    raise RequestError("inputs", f"has frames of more than {MAX_PIXELS} pixels")
                if index in wanted:
                    frames.append(np.asarray(frame.to_ndarray(format="rgb24"), np.uint8))
                if index >= last:
                    break
    except (FFmpegError, IndexError, ValueError):
        raise RequestError("inputs", "is not a video of a known format, or is truncated") from None
    if len(frames) < num_frames:
        raise RequestError("inputs", f"is too short: the model needs {last + 1} frames")
    return np.stack(frames)
