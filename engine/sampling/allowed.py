"""`allowed_token_ids`: masks every other token."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.sequence import Sequence as TokenSequence
from engine.sampling.rows import Change, Row, concatenated, integers
from engine.staging import Upload


class Allowed:
    """Caches each sequence's `allowed_token_ids` as an array."""

    def __init__(self) -> None:
        self._token_ids: WeakKeyDictionary[TokenSequence, NDArray[np.int64]] = WeakKeyDictionary()

    def plan(self, rows: Sequence[Row], vocab_size: int, upload: Upload) -> Change | None:
        indices = [index for index, row in enumerate(rows) if row.params.allowed_token_ids]
        if not indices:
            return None
        token_ids = [self._token_ids_of(rows[index].sequence) for index in indices]
        owner = np.arange(len(indices)).repeat(integers([len(ids) for ids in token_ids]))
        row_index = upload.put(integers(indices))
        flat_index = upload.put(owner * vocab_size + concatenated(token_ids))

        def change(scores: Tensor, newest: Tensor) -> None:
            row_scores = scores[row_index.tensor]
            kept = torch.full_like(row_scores, float("-inf")).view(-1)
            kept.scatter_(0, flat_index.tensor, row_scores.view(-1)[flat_index.tensor])
            scores.index_copy_(0, row_index.tensor, kept.view_as(row_scores))

        return change

    def _token_ids_of(self, sequence: TokenSequence) -> NDArray[np.int64]:
        if sequence not in self._token_ids:
            self._token_ids[sequence] = integers([*(sequence.params.allowed_token_ids or ())])
        return self._token_ids[sequence]
