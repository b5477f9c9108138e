"""Images as a column of a step: their embeddings, rotary positions and attention both ways."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.foreign_code import contained
from core.images import Images, PromptImage, images_in
from core.plan import Chunk
from core.sampling import ChunkResult, SequenceFailure
from engine.staging import Slot, Upload
from engine.step.column import Applied, Repeatable, RepeatableColumn
from engine.step.places import Places
from engine.stopwatch import Stopwatch
from kernels.attention.batch import ImageSpan, PagedBatch

logger = logging.getLogger(__name__)


class ImageColumn(RepeatableColumn):
    name = "vision"

    def __init__(
        self, encoder: Callable[[PromptImage, str], Tensor], model_time: Stopwatch
    ) -> None:
        """encoder: takes an image and a salt, and returns what it makes of the image's tokens,
        [image.num_tokens, levels * hidden], as `ImageEncoder` does. model_time: runs while images
        are encoded."""
        self._encoder = encoder
        self._model_time = model_time

    def is_used(self, chunks: Sequence[Chunk]) -> bool:
        return any(Images.of(chunk.sequence.parts) for chunk in chunks)

    def fits_graph(self, chunks: Sequence[Chunk]) -> bool:
        return not any(map(_images_in, chunks))  # a graph embeds only token ids

    def plan(self, places: Places, tokens: NDArray[np.int64], upload: Upload) -> Applied:
        """Encode new images, and wait for that.

        A sequence whose image fails still takes part in the step, and ends after it.
        """
        rows: list[NDArray[np.int64]] = []
        parts: list[Tensor] = []
        failures: dict[int, SequenceFailure] = {}
        with self._model_time:
            for chunk, start in places:
                try:
                    with contained:
                        embeddings = [self._encode(image, chunk) for image in _images_in(chunk)]
                except Exception as error:  # transformers' code may raise anything
                    logger.exception("image encoder failed request=%d", chunk.sequence.id)
                    reason = f"the image encoder failed: {error}"
                    failures[chunk.sequence.id] = SequenceFailure(reason)
                    continue
                parts += embeddings
                rows += [start + _within(image, chunk)[1] for image in _images_in(chunk)]
        axes = _axes(places, tokens[1])
        if axes is not None:
            tokens[1] = axes[0]
        num_rows = sum(map(len, rows))
        return _Images(
            upload.put(np.concatenate(rows)) if num_rows else None,
            torch.cat(parts) if num_rows else None,
            upload.put(axes) if axes is not None and num_rows else None,
            _image_spans(places),
            failures,
        )

    def repeat(self, tensors: Sequence[Tensor], numbers: tuple[tuple[int, ...], ...]) -> Repeatable:
        rows, embeddings, *axes = tensors
        spans = tuple(ImageSpan(*span) for span in numbers)
        return _Images(Slot(rows), embeddings, Slot(axes[0]) if axes else None, spans, {})

    def _encode(self, image: PromptImage, chunk: Chunk) -> Tensor:
        """Return the rows of the image's tokens in the chunk."""
        whole = self._encoder(image, chunk.sequence.prefix_salt)
        return whole[_within(image, chunk)[0]]


class _Images(Repeatable):
    name = ImageColumn.name

    def __init__(
        self,
        rows: Slot | None,
        embeddings: Tensor | None,
        axes: Slot | None,
        spans: tuple[ImageSpan, ...],
        failures: dict[int, SequenceFailure],
    ) -> None:
        """rows: [K] int64, the image tokens' indices among the step's T tokens; None if there are
        none. embeddings: [K, levels * hidden]. axes: [3, T] int64, the time, row and column
        of each token, for models whose rotary embedding uses them.
        """
        self._rows = rows
        self._embeddings = embeddings
        self._deeper: Sequence[Tensor] = ()
        """Those of the levels after the first, [K, hidden] each."""
        self._axes = axes
        self._spans = spans
        self._failures = failures

    @property
    def tensors(self) -> Sequence[Tensor]:
        if self._rows is None or self._embeddings is None:
            return ()
        axes = [] if self._axes is None else [self._axes.tensor]
        return [self._rows.tensor, self._embeddings, *axes]

    @property
    def numbers(self) -> tuple[tuple[int, ...], ...]:
        return self._spans

    def batched(self, batch: PagedBatch) -> PagedBatch:
        return replace(batch, images=self._spans) if self._spans else batch

    def embed(self, hidden: Tensor, positions: Tensor) -> Tensor:
        if self._rows is not None:
            assert self._embeddings is not None
            levels = self._embeddings.split(hidden.shape[1], dim=1)
            hidden.index_copy_(0, self._rows.tensor, levels[0])
            self._deeper = levels[1:]
            self.adds_to_layers = bool(self._deeper)
        return positions if self._axes is None else self._axes.tensor

    def after_layer(self, index: int, hidden: Tensor, output: Tensor | None) -> None:
        if self._rows is not None and index < len(self._deeper):
            hidden.index_add_(0, self._rows.tensor, self._deeper[index])

    def add_to(self, results: dict[int, ChunkResult]) -> None:
        results.update(self._failures)


def _images_in(chunk: Chunk) -> tuple[PromptImage, ...]:
    return images_in(chunk.sequence.parts, chunk.start, chunk.end)


def _within(image: PromptImage, chunk: Chunk) -> tuple[slice, NDArray[np.int64]]:
    """Return which of an image's tokens are in a chunk, and their indices among the chunk's."""
    tokens = np.arange(image.num_tokens)
    row_ends = 0 if image.row_length is None else tokens // image.row_length
    positions = image.start + tokens + row_ends
    first, last = np.searchsorted(positions, (chunk.start, chunk.end))
    return slice(first, last), positions[first:last] - chunk.start


def _image_spans(places: Places) -> tuple[ImageSpan, ...]:
    """Return the image tokens that attend to each other both ways. A padded step has none."""
    return tuple(
        ImageSpan(
            index,
            start - chunk.start + max(image.start, chunk.start),
            start - chunk.start + image.end,
            image.end,
        )
        for index, (chunk, start) in enumerate(places)
        for image in _images_in(chunk)
        if image.is_bidirectional
    )


def _axes(places: Places, positions: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Return the time, row and column of all tokens, [3, T]; None if no sequence has a grid.

    positions: [T], the tokens' indices in their sequences. The three coordinates of a text token or
    of a generated token are equal. After an image they continue from its largest coordinate.
    """
    gridded = [
        (chunk, start, images)
        for chunk, start in places
        if (images := Images.of(chunk.sequence.parts)) and images.images[0].grid
    ]
    if not gridded:
        return None
    axes = np.tile(positions, (3, 1))
    for chunk, start, images in gridded:
        _place_on_grids(axes[:, start : start + chunk.length], chunk, images)
    return axes


def _place_on_grids(axes: NDArray[np.int64], chunk: Chunk, images: Images) -> None:
    """Shift a chunk's coordinates, [3, length], for the images before it and in it."""
    shift = sum(_growth(image) for image in images.images if image.end <= chunk.start)
    axes += shift
    for image in images.within(chunk.start, chunk.end):
        _, width = _grid(image)
        inside = np.arange(max(image.start, chunk.start), min(image.end, chunk.end))
        row, column = np.divmod(inside - image.start, width)
        first = image.start + shift
        axes[:, inside - chunk.start] = first + np.stack([np.zeros_like(row), row, column])
        axes[:, max(0, image.end - chunk.start) :] += _growth(image)
        shift += _growth(image)


def _growth(image: PromptImage) -> int:
    """Return the number that an image adds to the coordinates of all tokens after it."""
    return max(_grid(image)) - image.num_tokens


def _grid(image: PromptImage) -> tuple[int, int]:
    assert image.grid is not None, "if one image of a model has a grid, all have one"
    return image.grid
