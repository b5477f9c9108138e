"""Repetition, frequency and presence penalties on the tokens of a sequence.

Only these tokens' logits are changed, so the cost depends on the number of distinct tokens, not on
the vocabulary. The host keeps the counts of all tokens but the newest, which may be in flight.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.sampling import SamplingParams
from core.sequence import Sequence
from engine.sampling.rows import Change, Planning, Stage, Use, integers


class Penalties(Stage["TokenCounts"]):
    """A sequence's state are the counts of its tokens."""

    fields = ("repetition_penalty", "frequency_penalty", "presence_penalty")

    def begin(self, sequence: Sequence) -> TokenCounts:
        return TokenCounts(sequence)

    def plan(self, uses: list[Use[TokenCounts]], planning: Planning) -> Change:
        upload, vocab_size = planning.upload, planning.vocab_size
        penalized = [use.row for use in uses]
        all_counts = [use.state for use in uses]
        for row, counts in zip(penalized, all_counts, strict=True):
            counts.count_until(row.num_tokens - 1)
        lengths = [len(counts.token_ids) for counts in all_counts]
        row_index = upload.put(integers([use.index for use in uses]))
        owner = upload.put(np.arange(len(uses)).repeat(lengths))
        tokens = upload.put(np.concatenate([counts.token_ids for counts in all_counts]))
        times = upload.put(np.concatenate([counts.times for counts in all_counts]))
        generated = upload.put(np.array([row.num_generated > 0 for row in penalized], np.float32))
        repetition, frequency, presence = (
            upload.put(np.array(values, np.float32))
            for values in zip(*(_factors(row.params) for row in penalized), strict=True)
        )

        def change(scores: Tensor, newest: Tensor) -> None:
            latest = newest[row_index.tensor]
            is_latest = tokens.tensor == latest[owner.tensor]
            # The newest token is added as an entry of its own, even if it has one already. Both
            # entries hold the same count, so it does not matter which is written last.
            known = times.tensor + is_latest * generated.tensor[owner.tensor]
            before = torch.zeros_like(generated.tensor).index_add_(
                0, owner.tensor, times.tensor * is_latest
            )
            entry_owner = torch.cat([owner.tensor, torch.arange(len(latest), device=latest.device)])
            entry_times = torch.cat([known, before + generated.tensor])
            entry_token = torch.cat([tokens.tensor, latest])
            flat_index = row_index.tensor[entry_owner] * vocab_size + entry_token
            flat = scores.view(-1)
            score, penalty = flat[flat_index], repetition.tensor[entry_owner]
            score = torch.where(score > 0, score / penalty, score * penalty)
            score = score - frequency.tensor[entry_owner] * entry_times
            score = score - presence.tensor[entry_owner] * (entry_times > 0)
            flat.scatter_(0, flat_index, score)

        return change


class TokenCounts:
    """The D distinct tokens of a sequence, and how often each was generated."""

    def __init__(self, sequence: Sequence) -> None:
        self._token_ids = sequence.token_ids
        """The sequence's own list, which grows."""
        self._num_prompt_tokens = sequence.num_prompt_tokens
        self._forget()

    def _forget(self) -> None:
        self._columns: dict[int, int] = {}
        self._entries = np.zeros((2, 64), np.int64)
        self.num_counted = 0

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """[D] int64."""
        return self._entries[0, : len(self._columns)]

    @property
    def times(self) -> NDArray[np.float32]:
        """[D]: occurrences in the answer; 0 for tokens of the prompt only."""
        return self._entries[1, : len(self._columns)].astype(np.float32)

    def count_until(self, end: int) -> None:
        """Count the first `end` tokens. All others may still change."""
        if end < self.num_counted:
            self._forget()
        for position in range(self.num_counted, end):
            column = self._column_of(self._token_ids[position])
            self._entries[1, column] += position >= self._num_prompt_tokens
        self.num_counted = end

    def _column_of(self, token_id: int) -> int:
        column = self._columns.setdefault(token_id, len(self._columns))
        if column == self._entries.shape[1]:
            self._entries = np.concatenate([self._entries, np.zeros_like(self._entries)], 1)
        self._entries[0, column] = token_id
        return column


def _factors(params: SamplingParams) -> tuple[float, float, float]:
    return params.repetition_penalty, params.frequency_penalty, params.presence_penalty
