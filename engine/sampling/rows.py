"""The sampled rows of a step, and the type of a logits processor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from core.sampling import SamplingParams
from core.sequence import Sequence

Change = Callable[[Tensor, Tensor], None]
"""A logits processor: changes logits [N, vocabulary] in place. Also gets the newest token of each
row, [N] int64."""


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


def integers(values: list[int]) -> NDArray[np.int64]:
    return np.array(values, np.int64)


def concatenated(parts: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate(parts) if parts else integers([])
