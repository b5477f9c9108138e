"""Repetition, frequency and presence penalties: logits of tokens that a sequence has.

Only those logits are touched, so the cost follows the distinct tokens, not the vocabulary. Their
counts are kept on the host from step to step, all but the newest token, which may be in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.sampling import SamplingParams
from core.sequence import Sequence as TokenSequence
from engine.sampling.rows import Change, Row, integers
from engine.staging import Parcel


class Penalties:
    """Plans them for step after step."""

    def __init__(self) -> None:
        self._counts: WeakKeyDictionary[TokenSequence, _Counts] = WeakKeyDictionary()

    def plan(self, rows: Sequence[Row], vocab_size: int, parcel: Parcel) -> Change | None:
        places = [place for place, row in enumerate(rows) if _is_penalized(row.params)]
        if not places:
            return None
        penalized = [rows[place] for place in places]
        counts = [self._counts_of(row) for row in penalized]
        lengths = [len(each.token_ids) for each in counts]
        place = parcel.put(integers(places))
        owner = parcel.put(np.arange(len(places)).repeat(lengths))
        tokens = parcel.put(np.concatenate([each.token_ids for each in counts]))
        times = parcel.put(np.concatenate([each.times for each in counts]))
        generated = parcel.put(np.array([row.num_generated > 0 for row in penalized], np.float32))
        repetition, frequency, presence = (
            parcel.put(np.array(values, np.float32))
            for values in zip(*(_factors(row.params) for row in penalized), strict=True)
        )

        def change(scores: Tensor, newest: Tensor) -> None:
            latest = newest[place()]
            is_latest = tokens() == latest[owner()]
            # The newest token comes as an entry of its own, beside the one that it may have
            # already: both say the same, so it does not matter which is written last.
            known = times() + is_latest * generated()[owner()]
            before = torch.zeros_like(generated()).index_add_(0, owner(), times() * is_latest)
            entry_owner = torch.cat([owner(), torch.arange(len(latest), device=latest.device)])
            entry_times = torch.cat([known, before + generated()])
            entry_token = torch.cat([tokens(), latest])
            index = place()[entry_owner] * vocab_size + entry_token
            flat = scores.view(-1)
            score, penalty = flat[index], repetition()[entry_owner]
            score = torch.where(score > 0, score / penalty, score * penalty)
            score = score - frequency()[entry_owner] * entry_times
            score = score - presence()[entry_owner] * (entry_times > 0)
            flat.scatter_(0, index, score)

        return change

    def _counts_of(self, row: Row) -> _Counts:
        """Of every token but the newest."""
        counts = self._counts.get(row.sequence)
        if counts is None or counts.num_counted > row.num_tokens - 1:
            counts = self._counts[row.sequence] = _Counts(row.sequence)
        counts.count_until(row.num_tokens - 1)
        return counts


class _Counts:
    """The distinct tokens of a sequence, and how many times the answer has each."""

    def __init__(self, sequence: TokenSequence) -> None:
        self._token_ids = sequence.token_ids
        """The sequence's own list, which grows. NOTE: not the sequence, which is held weakly."""
        self._num_prompt_tokens = sequence.num_prompt_tokens
        self._places: dict[int, int] = {}
        self._entries = np.zeros((2, 64), np.int64)
        self.num_counted = 0

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """[D]."""
        return self._entries[0, : len(self._places)]

    @property
    def times(self) -> NDArray[np.float32]:
        """[D]."""
        return self._entries[1, : len(self._places)].astype(np.float32)

    def count_until(self, end: int) -> None:
        for position in range(self.num_counted, end):
            place = self._place_of(self._token_ids[position])
            self._entries[1, place] += position >= self._num_prompt_tokens
        self.num_counted = end

    def _place_of(self, token_id: int) -> int:
        place = self._places.setdefault(token_id, len(self._places))
        if place == self._entries.shape[1]:
            self._entries = np.concatenate([self._entries, np.zeros_like(self._entries)], 1)
        self._entries[0, place] = token_id
        return place


def _is_penalized(params: SamplingParams) -> bool:
    return _factors(params) != (1, 0, 0)


def _factors(params: SamplingParams) -> tuple[float, float, float]:
    return params.repetition_penalty, params.frequency_penalty, params.presence_penalty
