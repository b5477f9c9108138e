"""Turn a text and its images into a prompt, as the model's own processor does.

transformers' processors of models that also take videos need torchvision, which we do without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from transformers import (
    AutoImageProcessor,
    AutoTokenizer,
    Gemma3Processor,
    Idefics3Processor,
    ProcessorMixin,
)

from core.images import Array, PromptImage
from core.protocol.messages import EncodedPrompt

DIGEST_BYTES = 16


class TileProcessor:
    """Idefics3 and SmolVLM: an image is cut into tiles, each with the same number of image tokens.

    Runs Idefics3Processor, which treats images as SmolVLMProcessor does.
    """

    def __init__(self, model_dir: Path, config: Any) -> None:
        """config: the model's configuration. Raises what transformers raises."""
        self._processor: Any = Idefics3Processor.from_pretrained(model_dir)
        self._image_token_id: int = config.image_token_id
        self.image_token: str = self._processor.image_token

    def __call__(
        self, text: str, images: Sequence[Any], *, add_special_tokens: bool
    ) -> EncodedPrompt:
        """Return the prompt, with a `PromptImage` for each tile.

        text: with an image token for each image. images: images of Pillow. Raises ValueError if
        they do not match.
        """
        ids, inputs = _processed(self._processor, text, images, add_special_tokens)
        pixels, mask = inputs["pixel_values"], inputs["pixel_attention_mask"].bool()
        num_tiles = pixels.shape[1]
        length = ids.count(self._image_token_id) // num_tiles
        starts = _starts(ids, self._image_token_id, [length] * num_tiles)
        tiles = [
            _image(
                start,
                length,
                {
                    "pixel_values": pixels[:, tile : tile + 1],
                    "pixel_attention_mask": mask[:, tile : tile + 1],
                },
            )
            for tile, start in enumerate(starts)
        ]
        return EncodedPrompt(ids, tuple(tiles))


class _WithoutTorchvision:
    """A model's images and texts, whose processor transformers only has with torchvision."""

    def __init__(self, model_dir: Path, config: Any, **options: object) -> None:
        """config: the model's configuration. options: of the processor of images. Raises what
        transformers raises.
        """
        self._images: Any = AutoImageProcessor.from_pretrained(model_dir)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
        self._options = options
        self._image_token_id: int = config.image_token_id
        self.image_token: str = self._tokenizer.convert_ids_to_tokens(config.image_token_id)

    def _inputs(self, images: Sequence[Any]) -> list[dict[str, Tensor]]:
        """Return what the encoder takes of each image."""
        return [
            dict(self._images(images=[image], return_tensors="pt", **self._options))
            for image in images
        ]

    def _ids(self, text: str, runs: Sequence[str], *, add_special_tokens: bool) -> list[int]:
        """Return the tokens of the text with run i in place of image token i.

        Raises ValueError if there are more or fewer image tokens than runs.
        """
        first, *others = text.split(self.image_token)
        if len(others) != len(runs):
            raise ValueError(f"{len(others)} image tokens for {len(runs)} images")
        expanded = first + "".join(run + other for run, other in zip(runs, others, strict=True))
        return self._tokenizer(expanded, add_special_tokens=add_special_tokens)["input_ids"]


class GridProcessor(_WithoutTorchvision):
    """Qwen2-VL to Qwen3-VL, GLM-V: an image is a grid of patches; each square of them is a token.

    Treats images as Qwen2_5_VLProcessor, Qwen3VLProcessor and Glm4vProcessor do.
    """

    def __init__(self, model_dir: Path, config: Any) -> None:
        """config: the model's configuration. Raises what transformers raises."""
        super().__init__(model_dir, config)
        self._merge: int = config.vision_config.spatial_merge_size

    def __call__(
        self, text: str, images: Sequence[Any], *, add_special_tokens: bool
    ) -> EncodedPrompt:
        """Return the prompt, with a `PromptImage` for each image; see `TileProcessor`."""
        inputs = self._inputs(images)
        patches = (tensors["image_grid_thw"][0].tolist() for tensors in inputs)
        grids = [(height // self._merge, width // self._merge) for _, height, width in patches]
        lengths = [height * width for height, width in grids]
        runs = [self.image_token * length for length in lengths]
        ids = self._ids(text, runs, add_special_tokens=add_special_tokens)
        starts = _starts(ids, self._image_token_id, lengths)
        columns = zip(starts, lengths, inputs, grids, strict=True)
        return EncodedPrompt(ids, tuple(_image(*column) for column in columns))


class RunProcessor:
    """Gemma 3: an image, or a crop of it (pan and scan), is a run of image tokens.

    The runs of all images have the same length, and their tokens attend both ways.
    """

    def __init__(self, model_dir: Path, config: Any) -> None:
        """config: the model's configuration. Raises what transformers raises."""
        self._processor: Any = Gemma3Processor.from_pretrained(model_dir)
        self._image_token_id: int = config.image_token_id
        self.image_token: str = self._processor.boi_token

    def __call__(
        self, text: str, images: Sequence[Any], *, add_special_tokens: bool
    ) -> EncodedPrompt:
        """Return the prompt, with a `PromptImage` for each run; see `TileProcessor`."""
        ids, inputs = _processed(self._processor, text, images, add_special_tokens)
        pixels = inputs["pixel_values"]
        length: int = self._processor.image_seq_length
        starts = _starts(ids, self._image_token_id, [length] * len(pixels))
        runs = [
            _image(start, length, {"pixel_values": crop[None]}, is_bidirectional=True)
            for start, crop in zip(starts, pixels, strict=True)
        ]
        return EncodedPrompt(ids, tuple(runs))


class RowProcessor(_WithoutTorchvision):
    """Mistral 3 (Pixtral): a grid as in `GridProcessor`, but a token of text ends each row.

    Treats images as PixtralProcessor does.
    """

    def __init__(self, model_dir: Path, config: Any) -> None:
        """config: the model's configuration. Raises what transformers raises."""
        self._side: int = config.vision_config.patch_size * config.spatial_merge_size
        super().__init__(model_dir, config, patch_size=self._side)
        names, _ = ProcessorMixin.get_processor_dict(model_dir)
        self._row_end: str = names.get("image_break_token", "[IMG_BREAK]")
        self._last_end: str = names.get("image_end_token", "[IMG_END]")

    def __call__(
        self, text: str, images: Sequence[Any], *, add_special_tokens: bool
    ) -> EncodedPrompt:
        """Return the prompt, with a `PromptImage` for each image; see `TileProcessor`."""
        inputs = self._inputs(images)
        grids = [(tensors["image_sizes"][0] // self._side).tolist() for tensors in inputs]
        runs = [self._run(*grid) for grid in grids]
        ids = self._ids(text, runs, add_special_tokens=add_special_tokens)
        lengths = [height * width for height, width in grids]
        starts = _starts(ids, self._image_token_id, lengths, [height - 1 for height, _ in grids])
        images = [
            _image(start, length, tensors, row_length=width)
            for start, length, tensors, (_, width) in zip(
                starts, lengths, inputs, grids, strict=True
            )
        ]
        return EncodedPrompt(ids, tuple(images))

    def _run(self, height: int, width: int) -> str:
        row = self.image_token * width
        return self._row_end.join([row] * height) + self._last_end


class CropProcessor(_WithoutTorchvision):
    """InternVL: an image is cut into crops, each with the same number of image tokens.

    Treats images as InternVLProcessor does.
    """

    def __init__(self, model_dir: Path, config: Any) -> None:
        """config: the model's configuration. Raises what transformers raises."""
        super().__init__(model_dir, config, crop_to_patches=True)
        self._length: int = config.image_seq_length

    def __call__(
        self, text: str, images: Sequence[Any], *, add_special_tokens: bool
    ) -> EncodedPrompt:
        """Return the prompt, with a `PromptImage` for each crop; see `TileProcessor`."""
        cut = [tensors["pixel_values"] for tensors in self._inputs(images)]
        runs = [self._run(len(crops)) for crops in cut]
        ids = self._ids(text, runs, add_special_tokens=add_special_tokens)
        pixels = [crop[None] for crops in cut for crop in crops]
        starts = _starts(ids, self._image_token_id, [self._length] * len(pixels))
        crops = [
            _image(start, self._length, {"pixel_values": crop})
            for start, crop in zip(starts, pixels, strict=True)
        ]
        return EncodedPrompt(ids, tuple(crops))

    def _run(self, num_crops: int) -> str:
        crops = self.image_token * (self._length * num_crops)
        return self._tokenizer.start_image_token + crops + self._tokenizer.end_image_token


PROCESSORS = {
    "tiles": TileProcessor,
    "grid": GridProcessor,
    "runs": RunProcessor,
    "rows": RowProcessor,
    "crops": CropProcessor,
}
"""The classes by the names that `engine.vision.families` uses."""


def _processed(
    processor: Any, text: str, images: Sequence[Any], add_special_tokens: bool
) -> tuple[list[int], Mapping[str, Tensor]]:
    """Run one of transformers' processors. Return the token ids, and all of its tensors."""
    inputs: Mapping[str, Tensor] = processor(
        text=[text],
        images=[list(images)],
        add_special_tokens=add_special_tokens,
        return_tensors="pt",
    )
    return inputs["input_ids"][0].tolist(), inputs


def _starts(
    ids: Sequence[int], token_id: int, lengths: Sequence[int], gaps: Sequence[int] | None = None
) -> list[int]:
    """Return the position of each image's first token. Image i has lengths[i] consecutive tokens.

    gaps: how many tokens of text are between those of an image; None: none. Raises ValueError if
    the ids do not fit that.
    """
    places = [at for at, other in enumerate(ids) if other == token_id]
    if len(places) != sum(lengths):
        raise ValueError(f"{len(places)} image tokens instead of {sum(lengths)}")
    ends = zip(accumulate(lengths), lengths, strict=True)
    runs = [places[end - length : end] for end, length in ends]
    for run, gap in zip(runs, gaps or [0] * len(runs), strict=True):
        if run[-1] - run[0] != len(run) - 1 + gap:
            raise ValueError("there is other text between the tokens of an image")
    return [run[0] for run in runs]


def _image(
    start: int,
    num_tokens: int,
    inputs: Mapping[str, Tensor],
    grid: tuple[int, int] | None = None,
    *,
    is_bidirectional: bool = False,
    row_length: int | None = None,
) -> PromptImage:
    arrays = {name: _array(tensor) for name, tensor in inputs.items()}
    digest = blake2b(msgspec.msgpack.encode(arrays), digest_size=DIGEST_BYTES).digest()
    return PromptImage(start, num_tokens, digest, arrays, grid, is_bidirectional, row_length)


def _array(tensor: Tensor) -> Array:
    data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return Array(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)
