"""OpenAI's completions: one choice for each prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from container.answers.answer import Record
from container.answers.openai import Envelope, finish_reason, usage
from container.failures import Failure
from container.generation import Generation
from container.interleaving import interleave
from container.schemas.completions import CompletionRequest
from core.text.answer import TokenText


class CompletionsAnswer:
    """A failure of one choice is the failure of all."""

    ends_with_done = True

    def __init__(
        self,
        generations: Sequence[Generation],
        request: CompletionRequest,
        envelope: Envelope,
        echoes: Sequence[str],
    ) -> None:
        """`echoes`: what comes before each answer."""
        self._generations = generations
        self._request = request
        self._envelope = envelope
        self._echoes = echoes

    def whole(self) -> object:
        """The `text_completion`."""
        for _ in interleave([generation.batches() for generation in self._generations]):
            pass
        choices = [
            self._choice(at, self._echoes[at] + each.text, each.tokens, len(self._echoes[at]))
            | {"finish_reason": finish_reason(each)}
            for at, each in enumerate(self._generations)
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
        generation, echo = self._generations[at], self._echoes[at]
        offset = len(echo)
        for batch in generation.batches():
            text = "".join(token.text for token in batch)
            if echo or text or self._request.logprobs:
                yield [self._record([self._choice(at, echo + text, batch, offset)])]
            echo, offset = "", offset + len(text)
        end = self._choice(at, "", (), offset) | {"finish_reason": finish_reason(generation)}
        yield [self._record([end])]

    def _record(self, choices: Sequence[Record], usage: Record | None = None) -> Record:
        counted = {"usage": usage} if self._request.include_usage else {}
        return self._envelope.record("text_completion", choices, **counted)

    def _choice(self, at: int, text: str, tokens: Sequence[TokenText], offset: int) -> Record:
        """`offset`: where the tokens begin in the whole text of the choice."""
        logprobs = _logprobs(tokens, offset) if self._request.logprobs and tokens else None
        return {"index": at, "text": text, "logprobs": logprobs, "finish_reason": None}


def _logprobs(tokens: Sequence[TokenText], offset: int) -> Record:
    offsets: list[int] = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": None,
        "text_offset": offsets,
    }
