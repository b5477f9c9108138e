"""Changes single logits: `bad_words`, `no_repeat_ngram_size`, `min_tokens` and `logit_bias`."""

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
from engine.staging import Upload

BAN = float("-inf")
ANY = -1
"""Stands for the newest token in a ban that applies after any token."""
Biases = tuple[NDArray[np.int64], NDArray[np.float32]]


class Edits:
    """Plans a step's changes to single logits. Caches each sequence's `logit_bias` as arrays."""

    def __init__(self, ngrams: Ngrams) -> None:
        self._ngrams = ngrams
        self._biases: WeakKeyDictionary[TokenSequence, Biases] = WeakKeyDictionary()

    def plan(self, rows: Sequence[Row], vocab_size: int, upload: Upload) -> Change | None:
        # NOTE: the newest token may be in flight. So the host matches bad words only up to the
        # token before it, and the device compares the newest one.
        bans = [
            (index, after, token)
            for index, row in enumerate(rows)
            if row.params.min_tokens or row.params.bad_words or row.params.no_repeat_ngram_size
            for after, token in self._bans(row, vocab_size)
        ]
        biased = [index for index, row in enumerate(rows) if row.params.logit_bias]
        if not bans and not biased:
            return None
        biases = [self._biases_of(rows[index].sequence) for index in biased]
        counts = integers([len(tokens) for tokens, _ in biases])
        num_biases = int(counts.sum())
        ban = np.array(bans, np.int64).reshape(-1, 3)
        indices = np.concatenate([ban[:, 0], integers(biased).repeat(counts)])
        after = upload.put(np.concatenate([ban[:, 1], np.full(num_biases, ANY)]))
        tokens = np.concatenate([ban[:, 2], concatenated([tokens for tokens, _ in biases])])
        values = [np.full(len(bans), BAN, np.float32), *(values for _, values in biases)]
        added = upload.put(np.concatenate(values))
        row_index = upload.put(indices)
        flat_index = upload.put(indices * vocab_size + tokens)

        def change(scores: Tensor, newest: Tensor) -> None:
            applies = (after.tensor == ANY) | (after.tensor == newest[row_index.tensor])
            scores.view(-1).scatter_add_(
                0, flat_index.tensor, torch.where(applies, added.tensor, 0.0)
            )

        return change

    def _bans(self, row: Row, vocab_size: int) -> Iterator[tuple[int, int]]:
        """Yield (newest token, banned token): the ban applies after this token, or after ANY."""
        yield from _end_tokens(row, vocab_size)
        yield from _bad_words(row)
        yield from ((ANY, token) for token in self._ngrams.banned_tokens(row))

    def _biases_of(self, sequence: TokenSequence) -> Biases:
        if sequence not in self._biases:
            bias = sequence.params.logit_bias
            self._biases[sequence] = integers([*bias]), np.array([*bias.values()], np.float32)
        return self._biases[sequence]


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
