"""`structured_outputs`: tokens with which no text of the grammar goes on are impossible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.sampling import Failure, Sampled
from core.sequence import Sequence as TokenSequence
from core.text.grammar import grammar_error
from engine.sampling.grammars import Grammars, Matcher
from engine.sampling.rows import Row, integers
from engine.staging import Parcel, Sent


class Grammar:
    """Plans it for step after step; keeps the matcher of each sequence.

    A matcher takes in each token once, when the host first sees it, whether or not the sequence is
    preempted then. The next mask needs that token, so such a sequence is never scheduled ahead.
    """

    def __init__(self, grammars: Grammars | None) -> None:
        """None where no answer is constrained."""
        self._grammars = grammars
        self._matchers: WeakKeyDictionary[TokenSequence, Matcher] = WeakKeyDictionary()

    def plan(self, rows: Sequence[Row], vocab_size: int, parcel: Parcel) -> GrammarMask | None:
        places = [place for place, row in enumerate(rows) if _is_constrained(row)]
        if not places:
            return None
        assert self._grammars is not None, "refused by the engine"
        matchers = [self._matcher_of(rows[place].sequence, self._grammars) for place in places]
        masks = self._grammars.masks(matchers, vocab_size)
        for place, mask in zip(places, masks, strict=True):
            if rows[place].params.ignore_eos:
                _go_on(mask, self._grammars.end_token_ids)
        by_place = dict(zip(places, matchers, strict=True))
        return GrammarMask(by_place, parcel.put(integers(places)), parcel.put(masks))

    def _matcher_of(self, sequence: TokenSequence, grammars: Grammars) -> Matcher:
        if sequence not in self._matchers:
            assert sequence.params.structured_outputs is not None
            self._matchers[sequence] = grammars.matcher(sequence.params.structured_outputs)
        return self._matchers[sequence]


class GrammarMask:
    """Of the constrained rows of a step. A Change, whose tokens are taken in when they are known.

    Where nothing is left of what the grammar allows, all of that is possible again.
    """

    def __init__(self, matchers: Mapping[int, Matcher], place: Sent, masks: Sent) -> None:
        """matchers: by row; place: [P] int64, the rows; masks: [P, bytes] uint8."""
        self._matchers = matchers
        self._place = place
        self._masks = masks

    def __call__(self, scores: Tensor, newest: Tensor) -> None:
        own = scores[self._place()]
        bit = torch.arange(8, dtype=torch.uint8, device=own.device)
        bits = (self._masks()[:, :, None] >> bit).bitwise_and_(1)
        is_allowed = bits.flatten(1)[:, : own.shape[1]].bool()
        own.masked_fill_(~is_allowed, float("-inf"))
        is_empty = own.amax(1, keepdim=True) == float("-inf")
        own.masked_fill_(is_empty & is_allowed, 0.0)
        scores.index_copy_(0, self._place(), own)

    def settle(self, sampled: list[Sampled | Failure]) -> None:
        """Takes in what was sampled, and says there of which row the answer is complete or wrong.

        sampled: of all rows of the step.
        """
        for place, matcher in self._matchers.items():
            own = sampled[place]
            assert isinstance(own, Sampled)
            if not matcher.consume_token(own.token_ids[0]):
                sampled[place] = Failure(str(grammar_error(matcher.get_error())))
            elif matcher.is_stopped():
                sampled[place] = replace(own, ends=True)


def _is_constrained(row: Row) -> bool:
    return row.params.structured_outputs is not None and row.sequence.finish is None


def _go_on(mask: NDArray[np.uint8], end_token_ids: Sequence[int]) -> None:
    """Takes the ends out of a mask, unless nothing else is in it."""
    without = mask.copy()
    for token_id in end_token_ids:
        without[token_id // 8] &= ~np.uint8(1 << token_id % 8)
    if without.any():
        mask[:] = without
