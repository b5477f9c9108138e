"""The answers to one prompt as their tokens arrive, and which of them are returned."""

from __future__ import annotations

import msgspec

from core.output import Output
from core.sampling import Finish, TopLogprobs
from core.text.answer import AnswerText, TokenText
from core.text.detokenizer import Detokenization
from core.text.stopping import StoppableAnswer


class Delta(msgspec.Struct, frozen=True):
    """New tokens of one answer. They are its last ones if `finish` is set."""

    index: int
    """Index of the answer among the returned ones."""
    tokens: list[TokenText]
    finish: Finish | None


class Answers:
    """The `n` answers to one prompt, made by `answers_to`."""

    def __init__(self, detokenization: Detokenization) -> None:
        params = detokenization.params
        self._num_returned = params.n
        self.may_stop = bool(params.stop)
        """Whether a stop string may end an answer."""
        kind = StoppableAnswer if self.may_stop else AnswerText
        self._sampled = [kind(detokenization) for _ in range(params.num_answers)]
        self.num_open = params.num_answers
        """Samples that have not ended, including those that will not be returned."""
        self.prompt_logprobs: list[TopLogprobs] = []
        """For the prompt's tokens from the second on, if the request has `prompt_logprobs`."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples, including those that will not be returned."""
        return sum(len(answer.tokens) for answer in self._sampled)

    @property
    def returned(self) -> list[AnswerText]:
        """The `n` answers so far."""
        return self._sampled

    def push(self, output: Output) -> list[Delta]:
        """Add an output of the engine, and return the deltas for the client.

        Drops output for an answer that a stop string has already ended.
        """
        answer = self._sampled[output.index]
        if answer.finish is not None:
            return []
        new = answer.push(output)
        self.num_open -= answer.finish is not None
        is_empty = not new and answer.finish is None
        return [] if is_empty else [Delta(output.index, new, answer.finish)]

    def is_stopped_by_string(self, output: Output) -> bool:
        """Whether a stop string ended the answer, so the caller must abort it in the engine."""
        return output.finish is None and self._sampled[output.index].finish is not None


class ScoredAnswers(Answers):
    """Answers of a request that may have `prompt_logprobs`.

    All of these come before the first token, and answers wait for them.
    """

    def __init__(self, detokenization: Detokenization) -> None:
        super().__init__(detokenization)
        wants_scores = detokenization.params.prompt_logprobs is not None
        self._num_scores = len(detokenization.prompt_token_ids) - 1 if wants_scores else 0
        self._held: list[Delta] = []
        """Deltas that wait for the rest of the prompt's logprobs."""

    def push(self, output: Output) -> list[Delta]:
        self.prompt_logprobs += output.prompt_logprobs
        self._held += self._deltas(output)
        if len(self.prompt_logprobs) < self._num_scores:
            return []
        deltas, self._held = self._held, []
        return deltas

    def _deltas(self, output: Output) -> list[Delta]:
        return super().push(output)


class RankedAnswers(ScoredAnswers):
    """The most likely of the answers that are sampled: `best_of`.

    They are ranked here because the engine does not know where a stop string cuts an answer.
    """

    @property
    def returned(self) -> list[AnswerText]:
        """The `n` best answers so far, best first. Final once all have ended."""
        ranked = sorted(self._sampled, key=lambda answer: -answer.cumulative_logprob)
        return ranked[: self._num_returned]

    def _deltas(self, output: Output) -> list[Delta]:
        """Return the best answers whole, once all have ended."""
        if not super()._deltas(output) or self.num_open:
            return []
        return [
            Delta(rank, answer.tokens, answer.finish) for rank, answer in enumerate(self.returned)
        ]


def answers_to(detokenization: Detokenization) -> Answers:
    """Return the answers to a request, none of which has begun."""
    params = detokenization.params
    if params.is_ranked:
        return RankedAnswers(detokenization)
    return (Answers if params.prompt_logprobs is None else ScoredAnswers)(detokenization)
