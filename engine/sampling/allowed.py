"""`allowed_token_ids`: masks every other token."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.sequence import Sequence
from engine.sampling.rows import Change, Planning, Stage, Use, concatenated, integers


class Allowed(Stage[NDArray[np.int64]]):
    """A sequence's state are its `allowed_token_ids`."""

    fields = ("allowed_token_ids",)

    def begin(self, sequence: Sequence) -> NDArray[np.int64] | None:
        allowed = sequence.params.allowed_token_ids
        return integers([*allowed]) if allowed else None

    def plan(self, uses: list[Use[NDArray[np.int64]]], planning: Planning) -> Change:
        token_ids = [use.state for use in uses]
        owner = np.arange(len(uses)).repeat(integers([len(ids) for ids in token_ids]))
        row_index = planning.upload.put(integers([use.index for use in uses]))
        flat_index = planning.upload.put(owner * planning.vocab_size + concatenated(token_ids))

        def change(scores: Tensor, newest: Tensor) -> None:
            row_scores = scores[row_index.tensor]
            kept = torch.full_like(row_scores, float("-inf")).view(-1)
            kept.scatter_(0, flat_index.tensor, row_scores.view(-1)[flat_index.tensor])
            scores.index_copy_(0, row_index.tensor, kept.view_as(row_scores))

        return change
