"""Changes single logits: `bad_words`, `no_repeat_ngram_size`, `min_tokens` and `logit_bias`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.sequence import Sequence
from engine.sampling.ngrams import NgramIndex
from engine.sampling.rows import Change, Planning, Row, Stage, Use, concatenated, integers

BAN = float("-inf")
ANY = -1
"""Stands for the newest token in a ban that applies after any token."""


@dataclass(frozen=True, slots=True)
class Edited:
    """A sequence with edits."""

    tokens: NDArray[np.int64]
    """Those with a bias."""
    values: NDArray[np.float32]
    """Their biases."""
    ngrams: NgramIndex | None


class Edits(Stage[Edited]):
    """Plans a step's changes to single logits."""

    fields = ("bad_words", "no_repeat_ngram_size", "min_tokens", "logit_bias")

    def __init__(self, *, with_prompt: bool) -> None:
        """with_prompt: n-grams of the prompt count too. False if an encoder reads the prompt."""
        self._with_prompt = with_prompt

    def begin(self, sequence: Sequence) -> Edited:
        params = sequence.params
        size, bias = params.no_repeat_ngram_size, params.logit_bias
        start = 0 if self._with_prompt else sequence.num_prompt_tokens
        ngrams = NgramIndex(size, start) if size else None
        return Edited(integers([*bias]), np.array([*bias.values()], np.float32), ngrams)

    def plan(self, uses: list[Use[Edited]], planning: Planning) -> Change | None:
        # NOTE: the newest token may be in flight. So the host matches bad words only up to the
        # token before it, and the device compares the newest one.
        upload, vocab_size = planning.upload, planning.vocab_size
        bans = [(use.index, *ban) for use in uses for ban in _bans(use, vocab_size)]
        biased = [use for use in uses if len(use.state.tokens)]
        if not bans and not biased:
            return None
        counts = integers([len(use.state.tokens) for use in biased])
        num_biases = int(counts.sum())
        ban = np.array(bans, np.int64).reshape(-1, 3)
        bias_rows = integers([use.index for use in biased]).repeat(counts)
        indices = np.concatenate([ban[:, 0], bias_rows])
        after = upload.put(np.concatenate([ban[:, 1], np.full(num_biases, ANY)]))
        tokens = np.concatenate([ban[:, 2], concatenated([use.state.tokens for use in biased])])
        values = [np.full(len(bans), BAN, np.float32), *(use.state.values for use in biased)]
        added = upload.put(np.concatenate(values))
        row_index = upload.put(indices)
        flat_index = upload.put(indices * vocab_size + tokens)

        def change(scores: Tensor, newest: Tensor) -> None:
            applies = (after.tensor == ANY) | (after.tensor == newest[row_index.tensor])
            scores.view(-1).scatter_add_(
                0, flat_index.tensor, torch.where(applies, added.tensor, 0.0)
            )

        return change


def _bans(use: Use[Edited], vocab_size: int) -> Iterator[tuple[int, int]]:
    """Yield (newest token, banned token): the ban applies after this token, or after ANY."""
    yield from _end_tokens(use.row, vocab_size)
    yield from _bad_words(use.row)
    if use.state.ngrams is not None:
        for token in use.state.ngrams.followers(use.row.sequence.token_ids):
            yield ANY, token


def _end_tokens(row: Row, vocab_size: int) -> Iterator[tuple[int, int]]:
    """Ban the tokens that would end an answer shorter than `min_tokens`."""
    if row.num_generated < row.params.min_tokens:
        for token in row.sequence.end_token_ids:
            if 0 <= token < vocab_size:
                yield ANY, token


def _bad_words(row: Row) -> Iterator[tuple[int, int]]:
    """Ban the last token of each bad word if the answer so far ends with the word's other tokens.

    The newest token is not compared here but on the device.
    """
    end = row.num_tokens - 1
    for word in row.params.bad_words:
        assert not isinstance(word, str), "the engine rejects words without token ids"
        if len(word) == 1:
            yield ANY, word[0]
        elif len(word) - 1 <= row.num_generated:
            before = list(word[:-2])
            if row.sequence.token_ids[end - len(before) : end] == before:
                yield word[-2], word[-1]
