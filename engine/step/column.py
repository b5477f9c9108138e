"""The columns of a step: optional features that only some of its sequences use.

The builder gives an executor the columns that its options and its model have. A step asks each
column whether it is used, and only those that are take part in its forward passes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from core.part import Part
from core.plan import Chunk, StepPlan
from core.sampling import ChunkResult
from engine.staging import Slot, Upload
from engine.step.places import Places
from kernels.attention.batch import PagedBatch


class Applied:
    """A column in one forward pass. These are the answers of a feature that changes nothing.

    The methods are called in this order.
    """

    adds_to_linears: bool = False
    """Whether the column adds to the outputs of linear layers, which then get the rows of all
    tokens."""
    adds_to_layers: bool = False
    """Whether `after_layer` is called. Known once `embed` has returned."""
    reads_normed: bool = False
    """Whether `read_normed` is called."""

    @property
    def extra_rows(self) -> Tensor | None:
        """[R] int64: indices of further tokens whose logits the column needs."""
        return None

    def batched(self, batch: PagedBatch) -> PagedBatch:
        """Return the batch for attention. The upload has been sent by now."""
        return batch

    def begin(self) -> None:
        """Prepare for the forward pass."""

    def embed(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """Change the layers' input, [T, hidden], in place.

        Return the positions for rotary embedding: [T] int64, or [3, T] as `Rotary` takes them.
        """
        return positions

    def after_layer(self, index: int, hidden: Tensor, output: Tensor | None) -> None:
        """Add to the residual stream after layer `index`, [T, hidden], in place.

        output: like `hidden`; the next norm adds it to the stream. None: there is nothing to add.
        """

    def read_normed(self, normed: Tensor) -> None:
        """Read the final norm's outputs of all tokens, [T, hidden].

        The next pass may overwrite them.
        """

    def end(self) -> None:
        """Clean up after the forward pass, even one that has failed."""

    def take(self, sampled: Tensor, extra: Tensor) -> None:
        """Start to copy results to the host, without waiting.

        sampled: logits [S, vocabulary] of the sampled chunks; extra: [R, vocabulary], those of
        `extra_rows`. A graph overwrites them in the next step.
        """

    def add_to(self, results: dict[int, ChunkResult]) -> None:
        """Wait for the copy and add to the results of the step, by sequence id."""


class Column(ABC):
    needs_part: ClassVar[bool] = True
    """Whether only sequences with a part use the column. Steps of others do not ask it."""

    def split(self, plan: StepPlan) -> list[StepPlan]:
        """Return the forward passes to make of one. The first one gets the block moves."""
        return [plan]

    @abstractmethod
    def is_used(self, chunks: Sequence[Chunk]) -> bool:
        """Whether the column takes part in a forward pass of these chunks."""

    def fits_graph(self, chunks: Sequence[Chunk]) -> bool:
        """Whether a CUDA graph can compute these chunks, which use the column."""
        return True

    def num_extra_rows(self, chunks: Sequence[Chunk]) -> int:
        """Return the length of `Applied.extra_rows`, if a graph can compute the chunks."""
        return 0

    @abstractmethod
    def plan(self, places: Places, tokens: NDArray[np.int64], upload: Upload) -> Applied:
        """Add the column's inputs to the upload.

        tokens: [3, T], the ids, positions and slots of the step, which the column may change.
        """


class PerToken(Applied):
    """A `PerTokenColumn` in one forward pass."""

    def __init__(self, name: str, numbers: Slot) -> None:
        self.name = name
        self._numbers = numbers

    @property
    def numbers(self) -> Tensor:
        """[T] int64."""
        return self._numbers.tensor


class PerTokenColumn(Column):
    """A column whose only input is a number for each token, for which graphs have a buffer."""

    name: str
    padding: int
    """The number of a token that is padding, or whose sequence does not use the column."""

    def number_of(self, parts: tuple[Part, ...]) -> int:
        """Return the number of all tokens of a sequence with these parts."""
        return self.padding

    @abstractmethod
    def of(self, numbers: Slot) -> PerToken:
        """Return the column in a forward pass with these numbers."""


class Repeatable(Applied):
    """A `RepeatableColumn` in one forward pass."""

    name: str

    @property
    def tensors(self) -> Sequence[Tensor]:
        """What the column does follows from these, and from `numbers`. Empty: it does nothing."""
        return ()

    @property
    def numbers(self) -> tuple[tuple[int, ...], ...]:
        return ()


class RepeatableColumn(Column):
    """A column of which processes without the plan can do the same, given what it works with."""

    name: str

    @abstractmethod
    def repeat(self, tensors: Sequence[Tensor], numbers: tuple[tuple[int, ...], ...]) -> Repeatable:
        """Return the column in a forward pass, from copies of what `Repeatable` has."""
