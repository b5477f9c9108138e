"""Runs transformers' own image encoder."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from core.configuration.limits import IMAGE_PIXELS
from core.images import Array, PromptImage
from engine.stopwatch import Stopwatch
from engine.vision.column import ImageColumn

MAX_KEPT_TOKENS = 2**14
"""Tokens whose embeddings are kept for later chunks and requests. With a hidden size of 2,048 in
bf16, these embeddings take 64 MiB."""
BLANK_PIXELS = 2**10
"""Size of a sample image. It shows the width of the outputs, and whether image tokens attend both
ways."""


class ImageEncoder:
    """Turns images into the embeddings of their tokens.

    Some encoders have several levels of outputs (DeepStack, arXiv:2406.04334). The first one is the
    embeddings. Level i is added to the residual stream after layer i - 1.

    The newest embeddings are kept on the device, up to MAX_KEPT_TOKENS: a prompt in chunks needs
    them in several steps, and the next turn of a conversation needs them again. Dropped embeddings
    are computed again when they are needed, as after a preemption, so that waiting requests hold no
    device memory.
    """

    input = "an image"

    def __init__(self, model: Any, blank: Callable[[int], PromptImage]) -> None:
        """model: a transformers model with `get_image_features`, on its device.

        blank: takes a number of pixels, and returns a blank image of that size, or of the model's
        maximum if that is less. Raises what transformers raises.
        """
        self._model = model
        self._blank = blank
        self.num_bytes: int = model.get_memory_footprint()
        sample = blank(BLANK_PIXELS)
        width = self._encode(sample).shape[1]
        self.max_kept_bytes: int = MAX_KEPT_TOKENS * width * model.dtype.itemsize
        self.undivided_tokens: int = sample.num_tokens if sample.is_bidirectional else 0
        """Tokens of an image that one step must compute whole; 0: steps may end inside an image."""
        self._kept: OrderedDict[tuple[str, bytes], Tensor] = OrderedDict()

    def __call__(self, image: PromptImage, salt: str = "") -> Tensor:
        """Return the levels of outputs side by side, [image.num_tokens, levels * hidden].

        salt: only calls with the same salt share embeddings, so that response times do not tell a
        client which images others have sent.

        Raises ValueError if the encoder returns a different number of embeddings.
        """
        key = salt, image.digest
        embeddings = self._kept.get(key)
        if embeddings is None:
            embeddings = self._kept[key] = self._encode(image)
        self._kept.move_to_end(key)
        while len(self._kept) > 1 and sum(map(len, self._kept.values())) > MAX_KEPT_TOKENS:
            self._kept.popitem(last=False)
        return embeddings

    def column(self, model_time: Stopwatch) -> ImageColumn:
        """Return the column that puts the embeddings into steps. model_time: runs meanwhile."""
        return ImageColumn(self, model_time)

    def run_largest(self) -> Tensor:
        """Encode the largest image that a request may have."""
        return self._encode(self._blank(IMAGE_PIXELS.maximum))

    @torch.inference_mode()
    def _encode(self, image: PromptImage) -> Tensor:
        device = self._model.device
        inputs = {name: _tensor(array).to(device) for name, array in image.inputs.items()}
        outputs = self._model.get_image_features(**inputs, return_dict=True)
        levels = (outputs.pooler_output, *(getattr(outputs, "deepstack_features", None) or ()))
        embeddings = torch.cat([torch.cat(tuple(level)) for level in levels], dim=1)
        if len(embeddings) != image.num_tokens:
            raise ValueError(
                f"the encoder returns {len(embeddings)} embeddings for {image.num_tokens} tokens"
            )
        return embeddings.to(self._model.dtype)


def _tensor(array: Array) -> Tensor:
    dtype: torch.dtype = getattr(torch, array.dtype)
    return torch.frombuffer(bytearray(array.data), dtype=torch.uint8).view(dtype).view(array.shape)
