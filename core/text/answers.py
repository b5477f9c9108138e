"""The answers to one prompt as their tokens arrive, and which of them are told."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from core.messages import Generated
from core.plan import Output
from core.sampling import Finish, SamplingParams, TopLogprobs
from core.text.answer import Answer, TokenText
from core.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class News:
    """New tokens of one answer; its last ones if `finish` is set."""

    index: int
    """Of the answer among those that are told."""
    tokens: list[TokenText]
    finish: Finish | None


class Answers:
    """The `n` answers to one prompt, each told to its own end.

    With `best_of` more are sampled and the likeliest told. They are ranked here and not by the
    engine, which does not know where a stop text has cut an answer. Scores of the prompt, where
    they are wanted, come before all else: an answer that is quicker than they are waits.
    """

    def __init__(
        self,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        prompt_token_ids: Sequence[int] = (),
        *,
        keep: Collection[int] = (),
    ) -> None:
        """Without a tokenizer answers have no text. keep: special tokens that are not skipped."""
        self._params = params
        self._sampled = [
            Answer.of(params, tokenizer, prompt_token_ids, keep=keep)
            for _ in range(params.num_answers)
        ]
        self.prompt_scores: list[TopLogprobs] = []
        """Of the prompt's tokens from the second on, where the request wants `prompt_logprobs`."""
        wants_scores = params.prompt_logprobs is not None
        self._num_scores = len(prompt_token_ids) - 1 if wants_scores else 0
        self._early: list[News] = []
        """What came before the last of the scores."""

    @property
    def num_open(self) -> int:
        """Samples, told or not, that have not ended."""
        return sum(each.finish is None for each in self._sampled)

    @property
    def num_tokens(self) -> int:
        """Of all samples, told or not."""
        return sum(len(each.tokens) for each in self._sampled)

    @property
    def told(self) -> list[Answer]:
        """The `n` answers so far; with `best_of` the best first, once all have ended."""
        if not self._params.is_ranked:
            return self._sampled
        ranked = sorted(self._sampled, key=lambda each: -each.cumulative_logprob)
        return ranked[: self._params.n]

    def push(self, output: Output | Generated) -> list[News]:
        """Takes in what the engine says of one answer; returns what there is to tell by now.

        What still comes of an answer that a stop text has ended is dropped.
        """
        self.prompt_scores += output.prompt
        self._early += self._new(output)
        if len(self.prompt_scores) < self._num_scores:
            return []
        news, self._early = self._early, []
        return news

    def stopped_by_text(self, output: Output | Generated) -> bool:
        """Whether the answer has ended without the engine, which must be told to abort it."""
        return output.finish is None and self._sampled[output.index].finish is not None

    def _new(self, output: Output | Generated) -> list[News]:
        answer = self._sampled[output.index]
        if answer.finish is not None:
            return []
        new = answer.push(output.token_ids, output.logprobs, output.finish, output.top)
        if not self._params.is_ranked:
            has_news = new or answer.finish is not None
            return [News(output.index, new, answer.finish)] if has_news else []
        if self.num_open:
            return []
        return [News(rank, each.tokens, each.finish) for rank, each in enumerate(self.told)]
