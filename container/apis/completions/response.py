"""Responses to OpenAI's completions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from container.apis.completions.echo import echoed_prompt
from container.apis.completions.schema import CompletionRequest
from container.apis.generation.generation import Generation
from container.apis.generation.logprobs import (
    ScoredToken,
    completion_logprobs,
    scored_answer_tokens,
)
from container.apis.generation.reply import Format, Record, StreamRecord
from container.apis.openai import (
    Chunks,
    Envelope,
    TextChunk,
    finish_reason,
    openai_error,
    usage,
)
from container.http.failures import Failure
from core.sampling import Finish
from core.text.answer import AnswerText, TokenText, text_of
from core.text.answers import Delta
from core.text.tokenizer import Tokenizer


class CompletionFormat(Format):
    """Writes `n` choices for each prompt, ordered by prompt."""

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
        self._request = request
        self._envelope = envelope
        self._chunks = Chunks(envelope, "text_completion")
        self._echoes = echoes
        self._tokenizer = tokenizer
        self._name = request.response_options.token_namer(tokenizer)
        self._offsets: dict[int, int] = {}
        """Characters of each choice that has begun, including the echo."""
        options = request.response_options
        self._has_details = bool(request.logprobs) or options.shows_token_ids
        self._is_plain = not (self._has_details or request.only_echo) and not (
            request.stream_usage.is_continuous
        )
        """Whether only the text of a choice's chunks differs."""
        self._text_chunks: dict[int, TextChunk] = {}
        """For the choices that have begun, if they are plain."""

    def delta(self, delta: Delta) -> Sequence[StreamRecord]:
        if write := self._text_chunks.get(delta.index):
            text = text_of(delta.tokens)
            return [write(text)] if text else []
        records = self._delta(delta)
        if self._is_plain:
            self._text_chunks[delta.index] = TextChunk(partial(self._text_chunk, delta.index))
        return records

    def _text_chunk(self, index: int, text: str) -> bytes:
        return self._record(self._prompt_of(index), _choice(index, text))

    def _delta(self, delta: Delta) -> Sequence[StreamRecord]:
        prompt, is_first = self._prompt_of(delta.index), delta.index not in self._offsets
        echo = self._echoes[prompt]
        prefix, echoed = (echo, self._echoed(prompt)) if is_first else ("", [])
        offset = self._offsets.get(delta.index, len(echo))
        tokens = self._returned(delta.tokens)
        text = text_of(tokens)
        self._offsets[delta.index] = offset + len(text)
        if not (prefix or text or self._has_details):
            return []
        choice = _choice(delta.index, prefix + text, self._logprobs(echoed, tokens, offset))
        ids = self._ids(prompt if is_first else None, tokens)
        return [self._record(prompt, {**choice, **ids})]

    def end(self, index: int) -> Sequence[StreamRecord]:
        prompt = self._prompt_of(index)
        answer = self._generations[prompt].answers[index % self._request.n]
        return [self._record(prompt, {**_choice(index, ""), **self._end(answer)})]

    def last(self) -> Sequence[StreamRecord]:
        if not self._request.stream_usage.is_included:
            return []
        return [self._chunks.chunk([], usage=self._usage(self._generations))]

    def document(self) -> object:
        """Return the `text_completion` object."""
        choices = [
            self._full_choice(prompt, index, answer, echoed)
            for prompt, generation in enumerate(self._generations)
            for echoed in [self._echoed(prompt)]
            for index, answer in enumerate(generation.answers, prompt * self._request.n)
        ]
        counts = self._usage(self._generations)
        return self._envelope.record("text_completion", choices=choices, usage=counts)

    def failure(self, failure: Failure) -> Record:
        return openai_error(failure)

    def _full_choice(
        self, prompt: int, index: int, answer: AnswerText, echoed: Sequence[ScoredToken]
    ) -> Record:
        echo, generation = self._echoes[prompt], self._generations[prompt]
        tokens = self._returned(answer.tokens)
        text = echo + text_of(tokens)
        logprobs = self._logprobs(echoed, tokens, len(echo))
        choice = _choice(index, text, logprobs)
        choice |= {**self._end(answer), **self._ids(prompt, tokens)}
        options = self._request.response_options
        return {**choice, **options.document_fields(generation, self._tokenizer)}

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
        counts = usage(generations, has_receipt=self._request.stream_usage.has_receipt)
        if not self._request.only_echo:
            return counts
        return {**counts, "completion_tokens": 0, "total_tokens": counts["prompt_tokens"]}

    def _prompt_of(self, index: int) -> int:
        """Return the number of the prompt that a choice answers."""
        return index // self._request.n

    def _record(self, prompt: int, choice: Record) -> bytes:
        generation = self._generations[prompt]
        usage_field = self._request.stream_usage.field(lambda: self._usage([generation]))
        return self._chunks.chunk([choice], **usage_field)

    def _echoed(self, prompt: int) -> list[ScoredToken]:
        """Return the prompt's tokens if the request wants their logprobs, else nothing."""
        if not self._request.echoes_logprobs:
            return []
        return echoed_prompt(self._generations[prompt], self._echoes[prompt], self._tokenizer)

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
