"""Where a step's chunks lie among its tokens and sequences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, islice

import numpy as np
from numpy.typing import NDArray

from core.configuration.step_size import StepSize
from core.plan import Chunk
from kernels.attention.batch import QuerySpan


class Places:
    """The places of a step's chunks; see `StepSize` for the order."""

    def __init__(self, chunks: Iterable[Chunk], size: StepSize | None) -> None:
        """size: as in `InputBuilder.build`."""
        self.chunks = sorted(chunks, key=lambda chunk: chunk.length > 1)
        """Decodes first; otherwise in the plan's order."""
        self.step = StepSize.of(self.chunks)
        self.size = size or self.step
        assert self.size.fits(self.step), f"{self.step} does not fit into {self.size}"
        self._is_padded = size is not None
        num_decodes = self.step.num_decodes
        lengths = [chunk.length for chunk in self.chunks[num_decodes:]]
        ends = accumulate(lengths, initial=self.size.num_decodes)
        self.ends = [*range(1, num_decodes + 1), *islice(ends, 1, None)]
        """For each chunk, the index after its last token."""
        self._lens = [chunk.end for chunk in self.chunks]
        self.sampled = tuple(chunk for chunk in self.chunks if chunk.samples_token)

    def __iter__(self) -> Iterator[tuple[Chunk, int]]:
        """Yield each chunk and the index of its first token."""
        starts = [end - chunk.length for chunk, end in zip(self.chunks, self.ends, strict=True)]
        return zip(self.chunks, starts, strict=True)

    def by_sequence(self, values: Sequence[int]) -> NDArray[np.int64]:
        """Place a value of each chunk into an array of all sequences; padding is 0."""
        placed = np.zeros(self.size.num_sequences, np.int64)
        num_decodes, first_prompt = self.step.num_decodes, self.size.num_decodes
        placed[:num_decodes] = values[:num_decodes]
        placed[first_prompt : first_prompt + self.step.num_prompts] = values[num_decodes:]
        return placed

    def of_samples(self) -> NDArray[np.int64]:
        """Return the rows to sample from, followed by zeros if the step is padded."""
        rows = [start + chunk.length - 1 for chunk, start in self if chunk.samples_token]
        padding = self.size.num_sequences - len(rows) if self._is_padded else 0
        return np.array(rows + [0] * padding, np.int64)

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
        num_decodes, first_prompt = self.step.num_decodes, self.size.num_decodes
        starts = np.full(self.size.num_prompts + 1, self.step.num_prompt_tokens, np.int32)
        ends = [first_prompt, *self.ends[num_decodes:]]
        starts[: len(ends)] = [end - first_prompt for end in ends]
        return starts

    def spans(self) -> tuple[QuerySpan, ...] | None:
        """Return the spans of an unpadded step, or None if the step is padded."""
        if self._is_padded:
            return None
        return tuple((start, start + chunk.length, chunk.end) for chunk, start in self)
