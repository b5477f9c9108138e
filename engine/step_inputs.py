"""Builds the input tensors of a forward pass from a step's plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.adapter import adapter_of
from core.configuration.step_size import StepSize
from core.images import Images, PromptImage, images_in
from core.plan import Chunk, StepPlan
from engine.block_tables import BlockTables
from engine.staging import Slot, Staging, Upload
from kernels.attention.batch import ImageSpan, PagedBatch, QuerySpan

PADDING_SLOT = -1
NO_ADAPTER = -1
NO_ROWS: Mapping[int, int] = {}
NO_EMBEDDINGS: Mapping[bytes, Tensor] = {}
Fill = Callable[[Tensor, Tensor], None]
"""(ids [T], newest [N']): fill in the ids in flight from `newest`, the previous step's tokens."""


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """The R prompt tokens whose logits score the prompt token after each (`prompt_logprobs`)."""

    rows: Tensor
    """[R] int64: their indices among the step's T tokens."""
    next_tokens: Tensor
    """[R] int64: the token that follows each of them."""
    chunks: tuple[Chunk, ...]
    """The chunks of these rows in order; each has `len(chunk.extra_rows)` rows."""


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """The K image tokens of a step, and the image embeddings that replace those of their ids."""

    rows: Tensor
    """[K] int64: their indices among the step's T tokens."""
    embeddings: Tensor
    """[K, hidden]."""
    positions: Tensor | None = None
    """[3, T] int64: the time, row and column of each of the step's tokens, for models whose rotary
    embedding uses them."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step's T tokens: decodes first, then longer chunks. Only CUDA graphs need padding."""

    tokens: Tensor
    """[3, T] int64: token ids, positions and the slot mapping."""
    sampled_rows: Tensor
    """[S] int64: indices of the tokens whose logits are sampled from. A padded step has a row for
    each of its sequences; rows past `sampled_chunks` are 0."""
    batch: PagedBatch
    sampled_chunks: tuple[Chunk, ...]
    """The chunk of each sampled row that is not padding."""
    scored_rows: ScoredRows | None = None
    adapter_slots: Tensor | None = None
    """[T] int64: each token's adapter slot or NO_ADAPTER. None if no token has an adapter."""
    images: ImageTokens | None = None
    """None if there are no image tokens."""

    @property
    def logit_rows(self) -> Tensor:
        """[S + R] int64: indices of the tokens that need logits."""
        if self.scored_rows is None:
            return self.sampled_rows
        return torch.cat([self.sampled_rows, self.scored_rows.rows])

    @property
    def token_ids(self) -> Tensor:
        """[T] int64."""
        return self.tokens[0]

    @property
    def positions(self) -> Tensor:
        """[T] int64."""
        return self.tokens[1]

    def newest(self) -> Tensor:
        """Return [S] int64: the input token of each sampled row."""
        return self.token_ids.index_select(0, self.sampled_rows[: len(self.sampled_chunks)])


class InputBuilder:
    """Builds the inputs of each step. Keeps the sequences' block tables on the device."""

    def __init__(self, block_size: int, staging: Staging) -> None:
        self._block_size = block_size
        self._staging = staging
        self._tables = BlockTables(staging.device)

    @torch.inference_mode()
    def build(
        self,
        plan: StepPlan,
        *,
        newest: Tensor | None = None,
        newest_rows: Mapping[int, int] = NO_ROWS,
        size: StepSize | None = None,
        embeddings: Mapping[bytes, Tensor] = NO_EMBEDDINGS,
    ) -> StepInputs:
        """Start copying the inputs to the device. Does not wait.

        newest: [N'] int64, the tokens sampled by the previous step. newest_rows: the index in
        `newest` of a sequence's token, by sequence id. If the last token of a chunk is in flight,
        the device copies it from `newest`.

        size: pad the step to this size, into which it fits. By default it is not padded.

        embeddings: the embeddings of the step's images by digest, on the device. The tokens of an
        image that is missing here keep the embeddings of their token ids.
        """
        chunks = sorted(plan.chunks, key=lambda chunk: chunk.length > 1)  # decodes first; stable
        places = _Places(chunks, size)
        ends = places.ends
        upload = Upload(self._staging)
        columns = self._tokens(chunks, places)
        axes = _axes(chunks, ends, columns[1])
        if axes is not None:
            columns[1] = axes[0]
        tokens = upload.put(columns)
        sampled_rows = upload.put(places.of_samples(chunks))
        scored = upload.put(_scored_rows(chunks, ends))
        batch = self._put_batch(chunks, places, upload)
        adapter_slots = _adapter_slots(chunks, places, upload)
        fill = _plan_fill(chunks, ends, newest_rows, upload)
        images = _image_tokens(chunks, ends, embeddings, axes, upload)
        upload.send()
        if fill is not None:
            assert newest is not None
            fill(tokens.tensor[0], newest)
        return StepInputs(
            tokens.tensor,
            sampled_rows.tensor,
            batch(tokens.tensor[2]),
            tuple(chunk for chunk in chunks if chunk.samples_token),
            _scored(chunks, scored.tensor),
            adapter_slots.tensor if adapter_slots is not None else None,
            images() if images is not None else None,
        )

    def _put_batch(
        self, chunks: Sequence[Chunk], places: _Places, upload: Upload
    ) -> Callable[[Tensor], PagedBatch]:
        """Add the tensors of attention to the upload.

        Return a function that takes the slot mapping; call it after the upload's `send`.
        """
        lens = [chunk.end for chunk in chunks]
        context_lens = upload.put(places.by_sequence(lens).astype(np.int32))
        starts = upload.put(places.query_starts())
        update = self._tables.put(chunks, upload)
        rows = upload.put(places.by_sequence(update.rows))
        num_blocks = -(-max(lens) // self._block_size)
        image_spans = _image_spans(chunks, places.ends)

        def batch(slot_mapping: Tensor) -> PagedBatch:
            self._tables.write(update)
            return PagedBatch(
                query_starts=starts.tensor,
                context_lens=context_lens.tensor,
                block_tables=self._tables.read(rows.tensor, num_blocks),
                slot_mapping=slot_mapping,
                spans=places.spans(chunks),
                num_decodes=places.size.num_decodes,
                images=image_spans,
            )

        return batch

    def _tokens(self, chunks: Sequence[Chunk], places: _Places) -> NDArray[np.int64]:
        """Return [3, T]: ids, positions and slots. The id of a token in flight is 0."""
        tokens = np.zeros((3, places.size.num_tokens), np.int64)
        tokens[2] = PADDING_SLOT
        num_decodes = places.step.num_decodes
        tokens[:, :num_decodes] = self._decode_columns(chunks[:num_decodes])
        for chunk, end in zip(chunks[num_decodes:], places.ends[num_decodes:], strict=True):
            tokens[:, end - chunk.length : end] = self._columns(chunk)
        return tokens

    def _decode_columns(self, chunks: Sequence[Chunk]) -> NDArray[np.int64]:
        ids = [0 if c.ends_in_flight else c.sequence.token_ids[c.start] for c in chunks]
        positions = np.array([chunk.start for chunk in chunks], int)
        blocks = np.array([c.blocks[c.start // self._block_size] for c in chunks], int)
        slots = blocks * self._block_size + positions % self._block_size
        return np.stack([np.array(ids, int), positions, slots])

    def _columns(self, chunk: Chunk) -> NDArray[np.int64]:
        ids = chunk.sequence.token_ids[chunk.start : chunk.end]
        positions = np.arange(chunk.start, chunk.end)
        block, offset = np.divmod(positions, self._block_size)
        slots = np.array(chunk.blocks, int)[block] * self._block_size + offset
        return np.stack([np.array(ids + [0] * (chunk.length - len(ids))), positions, slots])


class _Places:
    """Where a step's chunks lie among its tokens and sequences; see `StepSize` for the order."""

    def __init__(self, chunks: Sequence[Chunk], size: StepSize | None) -> None:
        """chunks: decodes first. size: as in `InputBuilder.build`."""
        self.step = StepSize.of(chunks)
        self.size = size or self.step
        assert self.size.fits(self.step), f"{self.step} does not fit into {self.size}"
        self._is_padded = size is not None
        num_decodes = self.step.num_decodes
        lengths = [chunk.length for chunk in chunks[num_decodes:]]
        ends = accumulate(lengths, initial=self.size.num_decodes)
        self.ends = [*range(1, num_decodes + 1), *islice(ends, 1, None)]
        """For each chunk, the index after its last token."""

    def by_sequence(self, values: Sequence[int]) -> NDArray[np.int64]:
        """Place a value of each chunk into an array of all sequences; padding is 0."""
        placed = np.zeros(self.size.num_sequences, np.int64)
        num_decodes, first_prompt = self.step.num_decodes, self.size.num_decodes
        placed[:num_decodes] = values[:num_decodes]
        placed[first_prompt : first_prompt + self.step.num_prompts] = values[num_decodes:]
        return placed

    def of_samples(self, chunks: Sequence[Chunk]) -> NDArray[np.int64]:
        """Return the rows to sample from, followed by zeros if the step is padded."""
        rows = [
            end - 1 for chunk, end in zip(chunks, self.ends, strict=True) if chunk.samples_token
        ]
        padding = self.size.num_sequences - len(rows) if self._is_padded else 0
        return np.array(rows + [0] * padding, np.int64)

    def query_starts(self) -> NDArray[np.int32]:
        """Return where each prompt starts among the prompts' tokens, and where the last one ends.

        Prompts that are padding have no tokens.
        """
        num_decodes, first_prompt = self.step.num_decodes, self.size.num_decodes
        starts = np.full(self.size.num_prompts + 1, self.step.num_prompt_tokens, np.int32)
        ends = [first_prompt, *self.ends[num_decodes:]]
        starts[: len(ends)] = [end - first_prompt for end in ends]
        return starts

    def spans(self, chunks: Sequence[Chunk]) -> tuple[QuerySpan, ...] | None:
        """Return the spans of an unpadded step, or None if the step is padded."""
        if self._is_padded:
            return None
        return tuple(
            (end - chunk.length, end, chunk.end)
            for chunk, end in zip(chunks, self.ends, strict=True)
        )


def _plan_fill(
    chunks: Sequence[Chunk], ends: Sequence[int], newest_rows: Mapping[int, int], upload: Upload
) -> Fill | None:
    """Plan how to fill in the tokens in flight. Return None if there are none."""
    in_flight = [
        (end - 1, newest_rows[chunk.sequence.id])
        for chunk, end in zip(chunks, ends, strict=True)
        if chunk.ends_in_flight
    ]
    if not in_flight:
        return None
    targets, rows = (upload.put(np.array(column, int)) for column in zip(*in_flight, strict=True))

    def fill(ids: Tensor, newest: Tensor) -> None:
        ids.index_copy_(0, targets.tensor, newest.index_select(0, rows.tensor))

    return fill


def _adapter_slots(chunks: Sequence[Chunk], places: _Places, upload: Upload) -> Slot | None:
    """Return [T] int64 slots, or None if no sequence has an adapter."""
    if not any(adapter_of(chunk.sequence.parts) for chunk in chunks):
        return None
    slots = np.full(places.size.num_tokens, NO_ADAPTER, np.int64)
    for chunk, end in zip(chunks, places.ends, strict=True):
        if adapter := adapter_of(chunk.sequence.parts):
            slots[end - chunk.length : end] = adapter.slot
    return upload.put(slots)


def _image_tokens(
    chunks: Sequence[Chunk],
    ends: Sequence[int],
    embeddings: Mapping[bytes, Tensor],
    axes: NDArray[np.int64] | None,
    upload: Upload,
) -> Callable[[], ImageTokens] | None:
    """Return a function to call after the upload's `send`; None if no image has embeddings."""
    rows: list[int] = []
    parts: list[Tensor] = []
    for chunk, end in zip(chunks, ends, strict=True) if embeddings else ():
        for image in images_in(chunk.sequence.parts, chunk.start, chunk.end):
            if image.digest in embeddings:
                first, last = max(image.start, chunk.start), min(image.end, chunk.end)
                rows += range(end - chunk.end + first, end - chunk.end + last)
                whole = embeddings[image.digest]
                parts.append(whole[first - image.start : last - image.start])
    if not parts:
        return None
    sent = upload.put(np.array(rows, np.int64))
    positions = None if axes is None else upload.put(axes)
    return lambda: ImageTokens(
        sent.tensor, torch.cat(parts), positions.tensor if positions is not None else None
    )


def _image_spans(chunks: Sequence[Chunk], ends: Sequence[int]) -> tuple[ImageSpan, ...]:
    """Return the image tokens that attend to each other both ways. A padded step has none."""
    return tuple(
        ImageSpan(
            index,
            end - chunk.end + max(image.start, chunk.start),
            end - chunk.end + image.end,
            image.end,
        )
        for index, (chunk, end) in enumerate(zip(chunks, ends, strict=True))
        for image in images_in(chunk.sequence.parts, chunk.start, chunk.end)
        if image.is_bidirectional
    )


def _axes(
    chunks: Sequence[Chunk], ends: Sequence[int], positions: NDArray[np.int64]
) -> NDArray[np.int64] | None:
    """Return the time, row and column of all tokens, [3, T]; None if no sequence has a grid.

    positions: [T], the tokens' indices in their sequences. The three coordinates of a text token or
    of a generated token are equal. After an image they continue from its largest coordinate.
    """
    gridded = [
        (chunk, end, images)
        for chunk, end in zip(chunks, ends, strict=True)
        if (images := Images.of(chunk.sequence.parts)) and images.images[0].grid
    ]
    if not gridded:
        return None
    axes = np.tile(positions, (3, 1))
    for chunk, end, images in gridded:
        _place_on_grids(axes[:, end - chunk.length : end], chunk, images)
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


def _scored_rows(chunks: Sequence[Chunk], ends: Sequence[int]) -> NDArray[np.int64]:
    """Return [2, R]: the scored rows and the prompt token after each."""
    pairs = [
        (end - chunk.end + position, chunk.sequence.token_ids[position + 1])
        for chunk, end in zip(chunks, ends, strict=True)
        for position in chunk.extra_rows
    ]
    return np.array(pairs, int).reshape(-1, 2).T


def _scored(chunks: Sequence[Chunk], rows: Tensor) -> ScoredRows | None:
    scoring = tuple(chunk for chunk in chunks if chunk.extra_rows)
    return ScoredRows(rows[0], rows[1], scoring) if scoring else None
