"""Numbers added to single logits: bad words, repeated runs, minimal length and `logit_bias`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.sequence import Sequence as TokenSequence
from engine.sampling.ngrams import Ngrams
from engine.sampling.rows import Change, Row, concatenated, integers
from engine.staging import Parcel

BAN = float("-inf")
ANY = -1
"""In place of the token that must be the newest one for an edit to count."""
Biases = tuple[NDArray[np.int64], NDArray[np.float32]]


class Edits:
    """Plans them for step after step; keeps each sequence's biases as arrays."""

    def __init__(self, ngrams: Ngrams) -> None:
        self._ngrams = ngrams
        self._biases: WeakKeyDictionary[TokenSequence, Biases] = WeakKeyDictionary()

    def plan(self, rows: Sequence[Row], vocab_size: int, parcel: Parcel) -> Change | None:
        # NOTE: the newest token may be known to the device alone, so bad words are matched up to
        # it here, and it itself there.
        bans = [
            (place, after, token)
            for place, row in enumerate(rows)
            if row.params.min_tokens or row.params.bad_words or row.params.no_repeat_ngram_size
            for after, token in self._bans(row, vocab_size)
        ]
        biased = [place for place, row in enumerate(rows) if row.params.logit_bias]
        if not bans and not biased:
            return None
        biases = [self._biases_of(rows[place].sequence) for place in biased]
        counts = integers([len(tokens) for tokens, _ in biases])
        num_biases = int(counts.sum())
        ban = np.array(bans, np.int64).reshape(-1, 3)
        places = np.concatenate([ban[:, 0], integers(biased).repeat(counts)])
        after = parcel.put(np.concatenate([ban[:, 1], np.full(num_biases, ANY)]))
        tokens = np.concatenate([ban[:, 2], concatenated([tokens for tokens, _ in biases])])
        values = [np.full(len(bans), BAN, np.float32), *(values for _, values in biases)]
        added = parcel.put(np.concatenate(values))
        place, index = parcel.put(places), parcel.put(places * vocab_size + tokens)

        def change(scores: Tensor, newest: Tensor) -> None:
            counts = (after() == ANY) | (after() == newest[place()])
            scores.view(-1).scatter_add_(0, index(), torch.where(counts, added(), 0.0))

        return change

    def _bans(self, row: Row, vocab_size: int) -> Iterator[tuple[int, int]]:
        """Tokens that must not come, each with the one that must be the newest for that."""
        yield from _end_tokens(row, vocab_size)
        yield from _bad_words(row)
        yield from ((ANY, token) for token in self._ngrams.repeating(row))

    def _biases_of(self, sequence: TokenSequence) -> Biases:
        if sequence not in self._biases:
            bias = sequence.params.logit_bias
            self._biases[sequence] = integers([*bias]), np.array([*bias.values()], np.float32)
        return self._biases[sequence]


def _end_tokens(row: Row, vocab_size: int) -> Iterator[tuple[int, int]]:
    """What would end an answer that is still too short."""
    if row.num_generated < row.params.min_tokens:
        for token in row.sequence.end_token_ids:
            if 0 <= token < vocab_size:
                yield ANY, token


def _bad_words(row: Row) -> Iterator[tuple[int, int]]:
    """The last token of each word whose others end the answer so far, as far as it is known."""
    end = row.num_tokens - 1
    for word in row.params.bad_words:
        assert not isinstance(word, str), "refused by the engine"
        if len(word) == 1:
            yield ANY, word[0]
        elif len(word) - 1 <= row.num_generated:
            before = list(word[:-2])
            if row.sequence.token_ids[end - len(before) : end] == before:
                yield word[-2], word[-1]
