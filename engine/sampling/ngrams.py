"""`no_repeat_ngram_size`: finds the tokens that would repeat an n-gram."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from core.part import Feature, Part
from core.sampling import SamplingParams

Followers = defaultdict[tuple[int, ...], set[int]]
"""The tokens that have followed each (n-1)-gram."""


class WithoutRepeats(Part):
    """The tokens that may not follow depend on the newest token."""

    __slots__ = ()
    needs_newest = True


class NgramLimits(Feature):
    fields = ("no_repeat_ngram_size",)

    def part(self, params: SamplingParams, num_prompt_tokens: int) -> WithoutRepeats | None:
        return WithoutRepeats() if params.no_repeat_ngram_size else None


class NgramIndex:
    """The n-grams of `size` tokens in a sequence, from position `start` on."""

    def __init__(self, size: int, start: int) -> None:
        self._size = size
        self._start = start
        self._num_indexed = start
        """All positions before this position have been indexed as the end of an n-gram."""
        self._followers: Followers = defaultdict(set)

    def followers(self, token_ids: list[int]) -> Collection[int]:
        """Index the new tokens. Return all that have followed the newest `size - 1` tokens."""
        before = self._size - 1
        for last in range(max(self._num_indexed, self._start + before), len(token_ids)):
            self._followers[tuple(token_ids[last - before : last])].add(token_ids[last])
        self._num_indexed = len(token_ids)
        end = len(token_ids)
        if end - self._start < before:
            return ()
        return self._followers.get(tuple(token_ids[end - before : end]), ())
