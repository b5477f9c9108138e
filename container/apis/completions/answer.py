"""OpenAI's completions: as many choices for each prompt as are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from container.apis.completions.schema import CompletionRequest
from container.apis.generation.answer import Record
from container.apis.generation.generation import Generation
from container.apis.generation.interleaving import interleave
from container.apis.generation.logprobs import (
    Place,
    completion_logprobs,
    places_of_answer,
    places_of_prompt,
    prompt_logprobs,
)
from container.apis.generation.prompting import beside_the_loop
from container.apis.openai.envelope import Envelope, finish_reason, usage
from container.http.failures import Failure
from core.text.answer import Answer, TokenText
from core.text.tokenizer import Tokenizer


class CompletionsAnswer:
    """The choices of a prompt stand together. A failure of one is the failure of all."""

    ends_with_done = True

    def __init__(
        self,
        generations: Sequence[Generation],
        request: CompletionRequest,
        envelope: Envelope,
        echoes: Sequence[str],
        tokenizer: Tokenizer,
    ) -> None:
        """`echoes`: what comes before each answer to a prompt."""
        self._generations = generations
        self._request = request
        self._envelope = envelope
        self._echoes = echoes
        self._tokenizer = tokenizer

    def whole(self) -> object:
        """The `text_completion`."""
        for _ in interleave([generation.news() for generation in self._generations]):
            pass
        choices = [
            self._whole_choice(at, index, answer, echoed)
            for at, generation in enumerate(self._generations)
            for echoed in [self._echoed(at)]
            for index, answer in enumerate(generation.answers)
        ]
        return self._envelope.record("text_completion", choices, usage=usage(self._generations))

    def pieces(self) -> Iterator[list[Record]]:
        """The texts of all choices as they come, then the usage."""
        yield from interleave([self._pieces(at) for at in range(len(self._generations))])
        if self._request.include_usage:
            yield [self._record([], usage(self._generations))]

    def failure(self, failure: Failure) -> Record:
        return failure.as_openai()

    def abort(self) -> None:
        for generation in self._generations:
            generation.abort()

    def _pieces(self, at: int) -> Iterator[list[Record]]:
        echo = self._echoes[at]
        offsets: dict[int, int] = {}
        for news in self._generations[at].news():
            number, begun = self._number(at, news.index), news.index in offsets
            before, echoed = ("", []) if begun else (echo, self._echoed(at))
            offset = offsets.get(news.index, len(echo))
            text = "".join(token.text for token in news.tokens)
            offsets[news.index] = offset + len(text)
            records: list[Record] = []
            if before or text or self._request.logprobs:
                logprobs = self._logprobs(echoed, news.tokens, offset)
                records.append(self._record([_choice(number, before + text, logprobs)]))
            if news.finish is not None:
                reason = finish_reason(news.finish)
                records.append(self._record([_choice(number, "", finish_reason=reason)]))
            yield records

    def _whole_choice(self, at: int, index: int, answer: Answer, echoed: Sequence[Place]) -> Record:
        echo, generation = self._echoes[at], self._generations[at]
        logprobs = self._logprobs(echoed, answer.tokens, len(echo))
        reason = finish_reason(answer.finish)
        choice = _choice(self._number(at, index), echo + answer.text, logprobs, reason)
        if self._request.decoding.params.prompt_logprobs is None or self._request.echoes_logprobs:
            return choice
        prompt, scores = generation.prompt_token_ids, generation.prompt_scores
        return {**choice, "prompt_logprobs": prompt_logprobs(prompt, scores, self._tokenizer)}

    def _number(self, at: int, index: int) -> int:
        """Of a choice among those of all prompts."""
        return at * self._request.n + index

    def _record(self, choices: Sequence[Record], usage: Record | None = None) -> Record:
        counted = {"usage": usage} if self._request.include_usage else {}
        return self._envelope.record("text_completion", choices, **counted)

    def _echoed(self, at: int) -> list[Place]:
        """The prompt's tokens, where their log-probabilities are part of the answer."""
        if not self._request.echoes_logprobs:
            return []
        generation, echo = self._generations[at], self._echoes[at]
        prompt, scores = generation.prompt_token_ids, generation.prompt_scores
        return beside_the_loop(
            lambda: places_of_prompt(prompt, scores, echo, self._tokenizer), size=len(prompt)
        )

    def _logprobs(
        self, echoed: Sequence[Place], tokens: Sequence[TokenText], offset: int
    ) -> Record | None:
        """`offset`: where the tokens begin in the whole text of the choice."""
        places = [*echoed, *places_of_answer(tokens, offset)]
        if not self._request.logprobs or not places:
            return None
        width = self._request.decoding.params.logprobs or 0
        return completion_logprobs(places, width, self._tokenizer)


def _choice(
    index: int, text: str, logprobs: Record | None = None, finish_reason: str | None = None
) -> Record:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
