"""The process that reads images for a worker: files and a text in, tokens and tensors out.

A hostile file can crash this process, which fails only the request that sent it.

`python -m engine.vision.reader PARENT`, with a socket as standard input. PARENT is the id of the
process that starts this one. This process ends with its parent. `core.images` has the messages.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from core.configuration.limits import IMAGE_PIXELS
from core.errors import ConfigurationError, RequestError
from core.foreign_code import EscapedError, contained
from core.images import PromptImage, ReaderSetup, ReadImages
from core.process.frames import run_helper
from core.process.internal_arguments import internal_arguments
from core.process.processes import cpu_limit, limit_memory
from core.protocol.messages import EncodedPrompt
from engine.vision.families import VISION_FAMILIES
from engine.vision.image_file import read_image

CPU_SECONDS = 10.0
"""CPU time for each image of a job. Qwen2.5-VL's processor takes 4.5 s for 4,000 × 4,000 pixels."""
MAX_CPU_SECONDS = 90.0
"""Limit on a job's CPU time. It is less than the time for which the worker waits."""
MEMORY_BYTES = 4 * 2**30
"""Memory that jobs may use on top of what the process uses once it has loaded the processor."""
FORMATS = ("PNG", "JPEG", "WEBP")
FIELD = "messages"


class ImageReader:
    """Turns a conversation's text and its images into a prompt."""

    def __init__(self, model_dir: Path) -> None:
        """Raises ConfigurationError if the model's files have no processor that works."""
        # Imported only here: before this, which is slow, the process must check its arguments and
        # make sure that it ends with its parent.
        from transformers import AutoConfig

        from engine.vision.processors import PROCESSORS

        config = AutoConfig.from_pretrained(model_dir)
        try:
            kind = PROCESSORS[VISION_FAMILIES[config.model_type].processor]
            self._processor = kind(model_dir, config)
        except (OSError, ValueError, ImportError) as error:
            raise ConfigurationError(
                f"{model_dir}: the processor of images cannot be loaded: {error}"
            ) from error

    def read(self, job: ReadImages) -> EncodedPrompt:
        """Return the prompt of a conversation.

        Raises RequestError if a file is not an image, or if the processor refuses it.
        """
        images = [
            read_image(file.data, file.field, IMAGE_PIXELS.maximum, FORMATS) for file in job.files
        ]
        try:
            with contained:
                return self._processor(job.text, images, add_special_tokens=job.add_special_tokens)
        except (EscapedError, ValueError, IndexError, RuntimeError) as error:
            if "can't allocate memory" in str(error):  # torch has no MemoryError
                raise MemoryError from error
            raise RequestError(
                FIELD, f"the model's processor refuses the images: {error}"
            ) from error

    def blank(self, num_pixels: int) -> PromptImage:
        """Return a white square of this many pixels as the processor prepares it.

        If the processor cuts images into tiles, return the first tile only.
        """
        from PIL import Image  # the processor needs it, so it is installed

        side = math.isqrt(num_pixels)
        white = Image.new("RGB", (side, side), "white")
        text = self._processor.image_token
        return self._processor(text, [white], add_special_tokens=False).images[0]


def start(setup: bytes) -> Callable[[bytes], EncodedPrompt]:
    """Return the function that reads images for the model named in the first message."""
    import torch

    torch.set_num_threads(1)
    reader = ImageReader(Path(msgspec.msgpack.decode(setup, type=ReaderSetup).model_dir))
    limit_memory(MEMORY_BYTES)
    decode = msgspec.msgpack.Decoder(ReadImages).decode

    def read(message: bytes) -> EncodedPrompt:
        job = decode(message)
        with cpu_limit(min(CPU_SECONDS * len(job.files), MAX_CPU_SECONDS)):
            return reader.read(job)

    return read


if __name__ == "__main__":
    description = "The helper that reads images. An HTTP worker starts it."
    [parent] = internal_arguments("engine.vision.reader", description, "PARENT:int")
    sys.exit(run_helper(int(parent), start))
