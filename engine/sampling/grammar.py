"""`structured_outputs`: masks the tokens that the grammar does not allow next."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.errors import RequestError
from core.sampling import Sampled, SequenceFailure
from core.sequence import Sequence
from core.text.grammar import converting_errors, grammar_error
from engine.sampling.grammars import MAX_OVERRUN_S, Constraint, Grammars
from engine.sampling.rows import Change, Planning, Stage, Use, integers
from engine.staging import Slot

TOO_AMBIGUOUS = (
    "the grammar is too ambiguous: its masks take too long; write left-recursive rules, "
    "and let each text match in one way only"
)


class Grammar(Stage[Constraint]):
    """Masks the rows whose answers are constrained.

    A matcher consumes each token once, when the token reaches the host, even if the sequence has
    been preempted by then. The next mask needs that token, so the strategy never schedules a
    constrained sequence ahead.
    """

    fields = ("structured_outputs",)

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars

    def begin(self, sequence: Sequence) -> Constraint | None:
        return Constraint.of(sequence.parts)

    def plan(self, uses: list[Use[Constraint]], planning: Planning) -> Change | None:
        uses = [use for use in uses if use.row.sequence.finish is None]
        if not uses:
            return None
        masks = self._grammars.masks([use.state for use in uses], planning.vocab_size)
        for use, mask in zip(uses, masks, strict=True):
            if use.row.params.ignore_eos:
                _mask_end_tokens(mask, self._grammars.end_token_ids)
        by_row = {use.index: use.state for use in uses}
        put = planning.upload.put
        change = GrammarMask(by_row, put(integers([*by_row])), put(masks))
        planning.settlers.append(change.settle)
        return change


class GrammarMask:
    """A Change that masks a step's constrained rows. `settle` consumes the sampled tokens.

    If other logits processors have masked every token that the grammar allows, these tokens all
    become equally likely.
    """

    def __init__(self, constraints: Mapping[int, Constraint], row_index: Slot, masks: Slot) -> None:
        """constraints: by row; row_index: [P] int64, these rows; masks: [P, bytes] uint8."""
        self._constraints = constraints
        self._row_index = row_index
        self._masks = masks

    def __call__(self, scores: Tensor, newest: Tensor) -> None:
        logits = scores[self._row_index.tensor]
        bit = torch.arange(8, dtype=torch.uint8, device=logits.device)
        bits = (self._masks.tensor[:, :, None] >> bit).bitwise_and_(1)
        is_allowed = bits.flatten(1)[:, : logits.shape[1]].bool()
        logits.masked_fill_(~is_allowed, float("-inf"))
        is_empty = logits.amax(1, keepdim=True) == float("-inf")
        logits.masked_fill_(is_empty & is_allowed, 0.0)
        scores.index_copy_(0, self._row_index.tensor, logits)

    def settle(self, sampled: list[Sampled | SequenceFailure]) -> None:
        """Advance the matchers by the sampled tokens of all rows of the step.

        Changes `sampled`: a row whose answer is complete gets `ends_answer=True`. A row with
        a grammar error becomes a SequenceFailure, and so does a row whose masks take too long
        before its answer is complete.
        """
        for row, constraint in self._constraints.items():
            sample = sampled[row]
            assert isinstance(sample, Sampled)
            try:
                with converting_errors():
                    sampled[row] = _advance(constraint, sample)
            except RequestError as error:  # the library's fault, not the request's
                sampled[row] = SequenceFailure(str(error))


def _advance(constraint: Constraint, sample: Sampled) -> Sampled | SequenceFailure:
    """Let the matcher consume a token, and return what `settle` makes of the token."""
    matcher = constraint.matcher
    if constraint.failure is not None:
        return SequenceFailure(constraint.failure)
    # A matcher that failed while it computed the mask allows, and accepts, only the end.
    if matcher.is_error() or not matcher.consume_token(sample.token_ids[0]):
        return _failure(matcher.get_error())
    if matcher.is_stopped():
        return replace(sample, ends_answer=True)
    if constraint.overrun_s > MAX_OVERRUN_S:
        return _failure(TOO_AMBIGUOUS)
    return sample


def _failure(message: str) -> SequenceFailure:
    """Return the failure of a grammar that the request has to change."""
    error = grammar_error(message)
    return SequenceFailure(error.message, error.field)


def _mask_end_tokens(mask: NDArray[np.uint8], end_token_ids: Collection[int]) -> None:
    """Disallow the end tokens, unless no other token is allowed."""
    without = mask.copy()
    for token_id in end_token_ids:
        without[token_id // 8] &= ~np.uint8(1 << token_id % 8)
    if without.any():
        mask[:] = without
