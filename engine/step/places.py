"""Where a step's chunks lie among its tokens and sequences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from core.configuration.step_size import StepSize
from core.plan import Chunk
from kernels.attention.batch import QuerySpan


class Places:
    """The places of a step's chunks; see `StepSize` for the order."""

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        self.chunks = sorted(chunks, key=lambda chunk: chunk.length > 1)
        """Decodes first; otherwise in the plan's order."""
        self.step = StepSize.of(self.chunks)
        self.size = self.step
        """With padding."""
        self.ends = [*accumulate(chunk.length for chunk in self.chunks)]
        """For each chunk, the index after its last token."""
        self._lens = [chunk.end for chunk in self.chunks]
        self.sampled = tuple(chunk for chunk in self.chunks if chunk.samples_token)

    def __iter__(self) -> Iterator[tuple[Chunk, int]]:
        """Yield each chunk and the index of its first token."""
        starts = [end - chunk.length for chunk, end in zip(self.chunks, self.ends, strict=True)]
        return zip(self.chunks, starts, strict=True)

    def by_sequence(self, values: Sequence[int]) -> NDArray[np.int64]:
        """Place a value of each chunk into an array of all sequences; padding is 0."""
        return np.array(values, np.int64)

    def of_samples(self) -> NDArray[np.int64]:
        """Return the rows to sample from, followed by zeros if the step is padded."""
        places = zip(self.chunks, self.ends, strict=True)
        return np.array([end - 1 for chunk, end in places if chunk.samples_token], np.int64)

    def context_lens(self) -> NDArray[np.int32]:
        """Return the tokens in each sequence's context, new ones included; 0 for padding."""
        return self.by_sequence(self._lens).astype(np.int32)

    def num_blocks(self, block_size: int) -> int:
        """Return how many blocks the longest context has."""
        return -(-max(self._lens) // block_size)

    def query_starts(self) -> NDArray[np.int32]:
        """Return where each prompt starts among the prompts' tokens, and where the last one ends.

        Prompts that are padding have no tokens.
        """
        first, ends = self.size.num_decodes, self.ends[self.step.num_decodes :]
        return np.array([0, *(end - first for end in ends)], np.int32)

    def spans(self) -> tuple[QuerySpan, ...] | None:
        """Return the spans of an unpadded step, or None if the step is padded."""
        return tuple((start, start + chunk.length, chunk.end) for chunk, start in self)


class PaddedPlaces(Places):
    """The places in a step that is padded to the size of a CUDA graph."""

    def __init__(self, chunks: Iterable[Chunk], size: StepSize) -> None:
        super().__init__(chunks)
        assert size.fits(self.step), f"{self.step} does not fit into {size}"
        self.size = size
        num_decodes = self.step.num_decodes
        padding = size.num_decodes - num_decodes
        self.ends[num_decodes:] = [end + padding for end in self.ends[num_decodes:]]

    def by_sequence(self, values: Sequence[int]) -> NDArray[np.int64]:
        placed = np.zeros(self.size.num_sequences, np.int64)
        num_decodes, first_prompt = self.step.num_decodes, self.size.num_decodes
        placed[:num_decodes] = values[:num_decodes]
        placed[first_prompt : first_prompt + self.step.num_prompts] = values[num_decodes:]
        return placed

    def of_samples(self) -> NDArray[np.int64]:
        rows = super().of_samples()
        return np.pad(rows, (0, self.size.num_sequences - len(rows)))

    def query_starts(self) -> NDArray[np.int32]:
        starts = np.full(self.size.num_prompts + 1, self.step.num_prompt_tokens, np.int32)
        known = super().query_starts()
        starts[: len(known)] = known
        return starts

    def spans(self) -> None:
        return None
