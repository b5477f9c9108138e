"""Responses to OpenAI's completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from container.apis.completions.schema import CompletionRequest
from container.apis.generation.generation import Generation
from container.apis.generation.interleaving import interleave
from container.apis.generation.logprobs import (
    ScoredToken,
    completion_logprobs,
    prompt_logprobs,
    scored_answer_tokens,
    scored_prompt_tokens,
)
from container.apis.generation.response import Record
from container.apis.openai import Envelope, finish_reason, usage
from container.http.failures import Failure
from container.http.off_loop import in_thread_if_long
from core.sampling import Finish
from core.text.answer import AnswerText, TokenText
from core.text.tokenizer import Tokenizer


class CompletionsResponse:
    """`n` choices for each prompt, ordered by prompt. If one fails, the whole response fails."""

    ends_with_done = True

    def __init__(
        self,
        generations: Sequence[Generation],
        request: CompletionRequest,
        envelope: Envelope,
        echoes: Sequence[str],
        tokenizer: Tokenizer,
    ) -> None:
        """`echoes` holds, for each prompt, the text to put before its answers."""
        self._generations = generations
        self.stream = request.stream
        self._request = request
        self._envelope = envelope
        self._echoes = echoes
        self._tokenizer = tokenizer
        self._name = request.response_options.token_namer(tokenizer)

    def full(self) -> object:
        """Run the generations and return the `text_completion` object."""
        for _ in interleave([generation.deltas() for generation in self._generations]):
            pass
        choices = [
            self._full_choice(prompt, index, answer, echoed)
            for prompt, generation in enumerate(self._generations)
            for echoed in [self._echoed(prompt)]
            for index, answer in enumerate(generation.answers)
        ]
        return self._envelope.record(
            "text_completion", choices, usage=self._usage(self._generations)
        )

    def chunks(self) -> Iterator[list[Record]]:
        """Yield the text of all choices as it arrives, then the usage."""
        prompts = range(len(self._generations))
        yield from interleave([self._chunks_of(prompt) for prompt in prompts])
        if self._request.stream_usage.is_included:
            counts = self._usage(self._generations)
            yield [self._envelope.record("text_completion", [], usage=counts)]

    def failure(self, failure: Failure) -> Record:
        return failure.as_openai()

    def abort(self) -> None:
        for generation in self._generations:
            generation.abort()

    def _chunks_of(self, prompt: int) -> Iterator[list[Record]]:
        echo = self._echoes[prompt]
        offsets: dict[int, int] = {}
        for delta in self._generations[prompt].deltas():
            index, is_first = self._choice_index(prompt, delta.index), delta.index not in offsets
            prefix, echoed = (echo, self._echoed(prompt)) if is_first else ("", [])
            offset = offsets.get(delta.index, len(echo))
            tokens = self._returned(delta.tokens)
            text = "".join(token.text for token in tokens)
            offsets[delta.index] = offset + len(text)
            records: list[Record] = []
            if (
                prefix
                or text
                or self._request.logprobs
                or self._request.response_options.shows_token_ids
            ):
                logprobs = self._logprobs(echoed, tokens, offset)
                ids = self._ids(prompt if is_first else None, tokens)
                choice = _choice(index, prefix + text, logprobs)
                records.append(self._record(prompt, {**choice, **ids}))
            if delta.finish is not None:
                answer = self._generations[prompt].answers[delta.index]
                records.append(self._record(prompt, {**_choice(index, ""), **self._end(answer)}))
            yield records

    def _full_choice(
        self, prompt: int, index: int, answer: AnswerText, echoed: Sequence[ScoredToken]
    ) -> Record:
        echo, generation = self._echoes[prompt], self._generations[prompt]
        tokens = self._returned(answer.tokens)
        text = echo + "".join(token.text for token in tokens)
        logprobs = self._logprobs(echoed, tokens, len(echo))
        choice = _choice(self._choice_index(prompt, index), text, logprobs)
        choice |= {**self._end(answer), **self._ids(prompt, tokens)}
        if self._request.decoding.params.prompt_logprobs is None or self._request.echoes_logprobs:
            return {**choice, "prompt_logprobs": None}
        token_ids, scores = generation.prompt_token_ids, generation.prompt_logprobs
        return {**choice, "prompt_logprobs": prompt_logprobs(token_ids, scores, self._tokenizer)}

    def _ids(self, prompt: int | None, tokens: Sequence[TokenText]) -> Record:
        """Return the fields with the token ids of the prompt, if it is given, and of the answer."""
        options = self._request.response_options
        of_prompt = {} if prompt is None else options.prompt_fields(self._generations[prompt])
        return {**of_prompt, **options.answer_fields(tokens)}

    def _returned(self, tokens: Sequence[TokenText]) -> Sequence[TokenText]:
        """Return the answer's tokens; none if the request wants only the prompt."""
        return [] if self._request.only_echo else tokens

    def _end(self, answer: AnswerText) -> Record:
        if self._request.only_echo:
            return {"finish_reason": finish_reason(Finish.LENGTH), "stop_reason": None}
        return {"finish_reason": finish_reason(answer.finish), "stop_reason": answer.stop_reason}

    def _usage(self, generations: Sequence[Generation]) -> Record:
        counts = usage(generations)
        if not self._request.only_echo:
            return counts
        return {**counts, "completion_tokens": 0, "total_tokens": counts["prompt_tokens"]}

    def _choice_index(self, prompt: int, index: int) -> int:
        """Return the index among the choices of all prompts."""
        return prompt * self._request.n + index

    def _record(self, prompt: int, choice: Record) -> Record:
        generation = self._generations[prompt]
        usage_field = self._request.stream_usage.field(lambda: self._usage([generation]))
        return self._envelope.record("text_completion", [choice], **usage_field)

    def _echoed(self, prompt: int) -> list[ScoredToken]:
        """Return the prompt's tokens if the request wants their logprobs, else nothing."""
        if not self._request.echoes_logprobs:
            return []
        generation, echo = self._generations[prompt], self._echoes[prompt]
        token_ids, scores = generation.prompt_token_ids, generation.prompt_logprobs
        return in_thread_if_long(
            lambda: scored_prompt_tokens(token_ids, scores, echo, self._tokenizer),
            size=len(token_ids),
        )

    def _logprobs(
        self, echoed: Sequence[ScoredToken], tokens: Sequence[TokenText], offset: int
    ) -> Record | None:
        """Return the `logprobs` of a choice. `offset`: characters of its text before `tokens`."""
        scored = [*echoed, *scored_answer_tokens(tokens, offset)]
        if not self._request.logprobs or not scored:
            return None
        num_top = self._request.decoding.params.logprobs or 0
        return completion_logprobs(scored, num_top, self._name)


def _choice(index: int, text: str, logprobs: Record | None = None) -> Record:
    """Return a choice that is still running."""
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}
