"""The rows of a step that are sampled, as every part of sampling sees them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from core.sampling import SamplingParams
from core.sequence import Sequence

Change = Callable[[Tensor, Tensor], None]
"""Changes scores [N, vocabulary] in place; also takes the newest token of each row, [N] int64."""


@dataclass(frozen=True, slots=True)
class Row:
    """Whose next token is drawn, and after how many tokens; the newest may be in flight."""

    sequence: Sequence
    num_tokens: int

    @property
    def params(self) -> SamplingParams:
        return self.sequence.params

    @property
    def num_generated(self) -> int:
        """Tokens of the answer so far, with the newest."""
        return self.num_tokens - self.sequence.num_prompt_tokens


def integers(values: list[int]) -> NDArray[np.int64]:
    return np.array(values, np.int64)


def concatenated(parts: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate(parts) if parts else integers([])
