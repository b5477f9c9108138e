"""`no_repeat_ngram_size`: which tokens would repeat so many in a row."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from weakref import WeakKeyDictionary

from core.sequence import Sequence as TokenSequence
from engine.sampling.rows import Row

Index = defaultdict[tuple[int, ...], set[int]]
"""By all but the last token of each run: what has followed them."""


class Ngrams:
    """Keeps each sequence's runs from step to step, so a step costs a look-up.

    The newest token must be known: such a sequence is never scheduled ahead.
    """

    def __init__(self, *, with_prompt: bool) -> None:
        """with_prompt: those of the prompt count, as for a decoder; an encoder's do not."""
        self._with_prompt = with_prompt
        self._runs: WeakKeyDictionary[TokenSequence, _Runs] = WeakKeyDictionary()

    def repeating(self, row: Row) -> Collection[int]:
        """The tokens that must not come next."""
        size = row.params.no_repeat_ngram_size
        if not size:
            return ()
        runs = self._runs.get(row.sequence)
        if runs is None:
            start = 0 if self._with_prompt else row.sequence.num_prompt_tokens
            runs = self._runs[row.sequence] = _Runs(size, start)
        return runs.continuing(row.sequence.token_ids)


class _Runs:
    """The runs of `size` tokens in a sequence from `start` on."""

    def __init__(self, size: int, start: int) -> None:
        self._size = size
        self._start = start
        self._num_counted = start
        """Tokens that may have ended a run so far."""
        self._following: Index = defaultdict(set)

    def continuing(self, token_ids: list[int]) -> Collection[int]:
        """What has followed the newest tokens before."""
        before = self._size - 1
        for last in range(max(self._num_counted, self._start + before), len(token_ids)):
            self._following[tuple(token_ids[last - before : last])].add(token_ids[last])
        self._num_counted = len(token_ids)
        end = len(token_ids)
        if end - self._start < before:
            return ()
        return self._following.get(tuple(token_ids[end - before : end]), ())
