"""Drafts as a column of a step: their ids, and the tokens sampled before each of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, zip_longest

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from core.plan import Chunk
from core.sampling import ChunkResult, Sampled, SequenceFailure
from engine.sampling.rows import Row
from engine.sampling.sampler import Choices, Sampler
from engine.staging import Slot, Upload
from engine.step.column import Applied, Column
from engine.step.places import Places
from strategies.speculation.drafts import DraftedChunk


class DraftColumn(Column):
    """Samples after the newest token and each draft but the last, after which the step samples.

    It must come after the columns that may fail a sequence.
    """

    needs_part = False

    def __init__(self, sampler: Sampler) -> None:
        """sampler: used by nobody else, since steps in flight have their own copies to a device."""
        self._sampler = sampler

    def is_used(self, chunks: Sequence[Chunk]) -> bool:
        return any(isinstance(chunk, DraftedChunk) for chunk in chunks)

    def num_extra_rows(self, chunks: Sequence[Chunk]) -> int:
        return sum(len(chunk.drafts) for chunk in chunks if isinstance(chunk, DraftedChunk))

    def plan(self, places: Places, tokens: NDArray[np.int64], upload: Upload) -> Applied:
        chunks: list[DraftedChunk] = []
        rows: list[range] = []
        for chunk, start in places:
            if isinstance(chunk, DraftedChunk):
                chunks.append(chunk)
                rows.append(range(start, start + len(chunk.drafts)))
                tokens[0, start + 1 : start + chunk.length] = chunk.drafts
        indices = np.fromiter(chain(*rows), np.int64)
        return _Drafts(chunks, upload.put(indices), upload.put(tokens[0, indices]), self._sampler)


class _Drafts(Applied):
    def __init__(
        self, chunks: Sequence[DraftedChunk], rows: Slot, newest: Slot, sampler: Sampler
    ) -> None:
        """rows: [R] int64, indices among the step's tokens; newest: [R] int64, the tokens there."""
        self._chunks = chunks
        self._rows = rows
        self._newest = newest
        self._sampler = sampler
        self._choices: Choices | None = None

    @property
    def extra_rows(self) -> Tensor:
        return self._rows.tensor

    def take(self, sampled: Tensor, extra: Tensor) -> None:
        rows = [
            Row(chunk.sequence, chunk.start + 1 + position)
            for chunk in self._chunks
            for position in range(len(chunk.drafts))
        ]
        self._choices = self._sampler.sample(extra, rows, lambda: self._newest.tensor)

    def add_to(self, results: dict[int, ChunkResult]) -> None:
        assert self._choices is not None, "`take` comes first"
        sampled = iter(self._choices.wait())
        for chunk in self._chunks:
            before = [next(sampled) for _ in chunk.drafts]
            last = results[chunk.sequence.id]
            if isinstance(last, Sampled):
                results[chunk.sequence.id] = _accepted(chunk.drafts, [*before, last])


def _accepted(
    drafts: Sequence[int], sampled: Sequence[Sampled | SequenceFailure]
) -> Sampled | SequenceFailure:
    """Return the tokens up to the first that differs from the draft in its place.

    sampled: one token more than there are drafts.
    """
    kept: list[Sampled] = []
    for token, draft in zip_longest(sampled, drafts):
        if isinstance(token, SequenceFailure):
            return token
        kept.append(token)
        if token.token_ids[0] != draft:
            break
    if len(kept) == 1:
        return kept[0]
    return Sampled(
        tuple(chain(*(token.token_ids for token in kept))),
        tuple(chain(*(token.logprobs for token in kept))),
        tuple(chain(*(token.top_logprobs for token in kept))),
    )
