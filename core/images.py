"""Images of prompts, on their way from the process that reads them to the engine's encoder."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import msgspec

from core.errors import RequestError
from core.part import Part

NO_IMAGES = (
    "this model takes no images here; Gemma 3, GLM-V, InternVL, Mistral 3, Qwen3-VL, Idefics3, "
    "SmolVLM and Qwen2.5-VL do, unless the start says that images are refused (docs/models.md)"
)


class Array(msgspec.Struct, frozen=True, array_like=True):
    """A tensor as bytes, in the machine's byte order."""

    dtype: str
    """The name that torch and NumPy share, such as float32."""
    shape: tuple[int, ...]
    data: bytes


class PromptImage(msgspec.Struct, frozen=True, array_like=True):
    """An image of a prompt, or one tile of it: a run of image tokens in the prompt.

    In the first layer, the encoder's outputs take the place of these tokens' embeddings.
    """

    start: int
    """Position of its first token in the prompt."""
    num_tokens: int
    """Without the tokens of text that end its rows."""
    digest: bytes
    """Hash of `inputs`: images with equal digests have equal embeddings."""
    inputs: dict[str, Array]
    """The arguments of the encoder, by name."""
    grid: tuple[int, int] | None = None
    """Height and width in tokens, for models that rotate by time, row and column (mrope)."""
    is_bidirectional: bool = False
    """Whether the image's tokens also attend to later tokens of the same image. If they do, a step
    must not end inside the image."""
    row_length: int | None = None
    """Image tokens in a row, if a token of text ends each row (Pixtral); None: the run is whole."""

    @property
    def end(self) -> int:
        """Position after its last image token."""
        row_ends = 0 if self.row_length is None else (self.num_tokens - 1) // self.row_length
        return self.start + self.num_tokens + row_ends

    @property
    def num_bytes(self) -> int:
        return sum(len(array.data) for array in self.inputs.values())


class Images(Part):
    """The images of a sequence's prompt, in the order of their positions."""

    __slots__ = ("images", "num_bytes")

    def __init__(self, images: tuple[PromptImage, ...]) -> None:
        self.images = images
        self.num_bytes = sum(image.num_bytes for image in images)

    def within(self, start: int, end: int) -> tuple[PromptImage, ...]:
        """Return the images with tokens at the positions `start : end`."""
        if start >= self.images[-1].end:
            return ()
        first = bisect_right(self.images, start, key=lambda image: image.end)
        after = bisect_left(self.images, end, key=lambda image: image.start)
        return self.images[first:after]

    def chunk_end(self, end: int) -> int:
        """A chunk must not end inside a bidirectional image. It may begin inside one, because the K
        and V of all earlier tokens are final.
        """
        for image in self.within(end - 1, end + 1):
            if image.is_bidirectional and image.start < end < image.end:
                return image.start
        return end

    def content(self, start: int, end: int) -> bytes:
        """The tokens of all images have the same id, so their ids do not tell them apart."""
        return b"".join(image.digest for image in self.within(start, end))


def images_in(parts: tuple[Part, ...], start: int, end: int) -> tuple[PromptImage, ...]:
    """Return a sequence's images with tokens at the positions `start : end`."""
    images = Images.of(parts)
    return images.within(start, end) if images is not None else ()


class ReaderSetup(msgspec.Struct, frozen=True):
    """The first message to the process that reads images."""

    model_dir: str


class ImageFile(msgspec.Struct, frozen=True, array_like=True):
    """An image as a client sent it."""

    field: str
    """The request's field that holds it, for errors."""
    data: bytes
    """A PNG, JPEG or WebP file."""


class ReadImages(msgspec.Struct, frozen=True):
    """Decode images, and give each as many image tokens in the prompt as it needs."""

    text: str
    """The rendered conversation, with the model's image token once for each image."""
    files: tuple[ImageFile, ...]
    add_special_tokens: bool


def check_images(
    images: Sequence[PromptImage], num_tokens: int, *, takes_images: bool, is_cut: bool
) -> None:
    """Raise RequestError if the model takes no images, or not these of a prompt.

    num_tokens: those of the prompt. is_cut: whether it may be truncated.
    """
    if not takes_images:
        raise RequestError("messages", NO_IMAGES)
    if is_cut:
        raise RequestError("truncate_prompt_tokens", "cannot cut a prompt with images")
    if images[-1].end > num_tokens:
        raise RequestError("images", f"the last one ends at token {images[-1].end} of {num_tokens}")
