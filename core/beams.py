"""Beam search: which beams continue, which are finished, and when the search ends.

The rules are those of transformers' `generate(num_beams=...)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from core.sampling import ChunkResult, Finish, SamplingParams


@dataclass(frozen=True, slots=True)
class Candidates(ChunkResult):
    """The most likely next tokens of one beam, most likely first."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished answer."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish
    score: float
    """Its log-probability, divided by its length to the power of `length_penalty`."""


@dataclass(frozen=True, slots=True)
class Hypotheses(ChunkResult):
    """The finished answers, best first, of a search that an executor runs as a whole."""

    best: tuple[Hypothesis, ...]


@dataclass(frozen=True, slots=True)
class Beam:
    """A live beam: the answer so far, and the index of the previous step's beam that it extends."""

    parent: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    total: float


def num_candidates(params: SamplingParams, num_stop_tokens: int) -> int:
    """Return how many next tokens to consider for each beam.

    These are enough to leave `beam_width` tokens when all stop tokens are removed.
    """
    return params.beam_width * max(2, 1 + num_stop_tokens)


class BeamSearch:
    """One search. Once `is_done` is set, `hypotheses` holds the best answers, best first."""

    def __init__(self, params: SamplingParams, stop_token_ids: Mapping[int, Finish]) -> None:
        self._params = params
        self._width = params.beam_width
        self._stop_token_ids = stop_token_ids
        self._num_candidates = num_candidates(params, len(stop_token_ids))
        self._can_improve = True
        self.beams = [Beam(0, (), (), 0.0)]
        self.hypotheses: list[Hypothesis] = []
        self.is_done = False

    @property
    def _is_full(self) -> bool:
        return len(self.hypotheses) == self._width

    def advance(self, candidates: Sequence[Candidates]) -> None:
        """Take one step: keep the most likely of all continuations of all beams.

        candidates: the next tokens of each beam, in the order of `beams`.
        """
        extensions = [
            (beam.total + logprob, parent, token_id, logprob)
            for parent, (beam, tokens) in enumerate(zip(self.beams, candidates, strict=True))
            for token_id, logprob in zip(tokens.token_ids, tokens.logprobs, strict=True)
        ]
        extensions.sort(key=lambda extension: -extension[0])
        ranked = [
            Beam(
                parent,
                (*self.beams[parent].token_ids, token_id),
                (*self.beams[parent].logprobs, logprob),
                total,
            )
            for total, parent, token_id, logprob in extensions[: self._num_candidates]
        ]
        live = [beam for beam in ranked if self._finish(beam) is None]
        if self._can_improve and not (self._is_full and self._params.early_stopping is True):
            # Beams ranked below the beam width never become hypotheses. They only take the places
            # of finished beams.
            self._keep_best([beam for beam in ranked[: self._width] if self._finish(beam)])
        self.beams = live[: self._width]
        self._can_improve = self._can_improve and bool(live) and self._may_improve()
        stops_early = self._is_full and self._params.early_stopping is True
        self.is_done = not self._can_improve or stops_early

    def _finish(self, beam: Beam) -> Finish | None:
        stop = self._stop_token_ids.get(beam.token_ids[-1])
        is_longest = len(beam.token_ids) == self._params.max_tokens
        return stop or (Finish.LENGTH if is_longest else None)

    def _keep_best(self, ended: Sequence[Beam]) -> None:
        for beam in ended:
            score = beam.total / len(beam.token_ids) ** self._params.length_penalty
            finish = self._finish(beam)
            assert finish is not None
            self.hypotheses.append(Hypothesis(beam.token_ids, beam.logprobs, finish, score))
        self.hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
        del self.hypotheses[self._width :]

    def _may_improve(self) -> bool:
        """Whether the most likely beam could still score higher than the worst hypothesis.

        Scores the beam at its current length. If `early_stopping` is "never" and longer answers
        score higher, scores it at the longest possible length instead.
        """
        if not self._is_full:
            return True
        length = len(self.beams[0].token_ids)
        if self._params.early_stopping == "never" and self._params.length_penalty > 0:
            length = self._params.max_tokens
        best = self.beams[0].total / length**self._params.length_penalty
        return best > self.hypotheses[-1].score
