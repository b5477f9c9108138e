"""`allowed_token_ids`: every other token is impossible."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.sequence import Sequence as TokenSequence
from engine.sampling.rows import Change, Row, concatenated, integers
from engine.staging import Parcel


class Allowed:
    """Plans it for step after step; keeps each sequence's tokens as an array."""

    def __init__(self) -> None:
        self._token_ids: WeakKeyDictionary[TokenSequence, NDArray[np.int64]] = WeakKeyDictionary()

    def plan(self, rows: Sequence[Row], vocab_size: int, parcel: Parcel) -> Change | None:
        places = [place for place, row in enumerate(rows) if row.params.allowed_token_ids]
        if not places:
            return None
        token_ids = [self._token_ids_of(rows[place].sequence) for place in places]
        owner = np.arange(len(places)).repeat(integers([len(each) for each in token_ids]))
        place = parcel.put(integers(places))
        index = parcel.put(owner * vocab_size + concatenated(token_ids))

        def change(scores: Tensor, newest: Tensor) -> None:
            own = scores[place()]
            kept = torch.full_like(own, float("-inf")).view(-1)
            kept.scatter_(0, index(), own.view(-1)[index()])
            scores.index_copy_(0, place(), kept.view_as(own))

        return change

    def _token_ids_of(self, sequence: TokenSequence) -> NDArray[np.int64]:
        if sequence not in self._token_ids:
            self._token_ids[sequence] = integers([*(sequence.params.allowed_token_ids or ())])
        return self._token_ids[sequence]
