"""The sampled rows of a step, and the stages that change their logits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from core.sampling import Sampled, SamplingParams, SequenceFailure
from core.sequence import Sequence
from engine.staging import Upload

State = TypeVar("State")
Change = Callable[[Tensor, Tensor], None]
"""A logits processor: changes logits [N, vocabulary] in place. Also gets the newest token of each
row, [N] int64."""
Settle = Callable[[list[Sampled | SequenceFailure]], None]
"""Changes what all rows of a step have sampled, once that is on the host."""


@dataclass(frozen=True, slots=True)
class Row:
    """A sequence whose next token is sampled."""

    sequence: Sequence
    num_tokens: int
    """Tokens before the sampled one, including one that may be in flight."""

    @property
    def params(self) -> SamplingParams:
        return self.sequence.params

    @property
    def num_generated(self) -> int:
        """Generated tokens, including one that may be in flight."""
        return self.num_tokens - self.sequence.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class Use(Generic[State]):
    """A row that uses a stage."""

    index: int
    row: Row
    state: State


@dataclass(frozen=True, slots=True)
class Planning:
    """What the stages of a step add to."""

    vocab_size: int
    upload: Upload
    settlers: list[Settle] = field(default_factory=list)


class Stage(ABC, Generic[State]):
    """A logits processor for the sequences whose parameters ask for it."""

    fields: ClassVar[tuple[str, ...]]
    """These parameters. A sequence with all of them at their defaults does not use the stage."""

    @abstractmethod
    def begin(self, sequence: Sequence) -> State | None:
        """Return the stage's state for a sequence, or None if the sequence does not use it.

        Called once for each sequence that may use it. The state lives as long as the sequence, to
        which it must not refer.
        """

    @abstractmethod
    def plan(self, uses: list[Use[State]], planning: Planning) -> Change | None:
        """Plan a step with these rows, at least one. Return None if nothing is to be changed."""


def integers(values: list[int]) -> NDArray[np.int64]:
    return np.array(values, np.int64)


def concatenated(parts: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate(parts) if parts else integers([])
