"""OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from container.apis.chat.message import Message
from container.apis.chat.schema import ChatRequest
from container.apis.generation.answer import Record
from container.apis.generation.generation import Generation
from container.apis.generation.logprobs import chat_logprobs, prompt_logprobs
from container.apis.openai.envelope import Envelope, finish_reason, usage
from container.http.failures import Failure
from core.sampling import Finish
from core.text.answer import TokenText
from core.text.answers import News
from core.text.tokenizer import Tokenizer


class ChatAnswer:
    """A choice for each answer to the conversation."""

    ends_with_done = True

    def __init__(
        self,
        generation: Generation,
        request: ChatRequest,
        envelope: Envelope,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
    ) -> None:
        """`messages`: one for each choice."""
        self._generation = generation
        self._request = request
        self._envelope = envelope
        self._tokenizer = tokenizer
        self._messages = messages

    def whole(self) -> object:
        """The `chat.completion`."""
        self._generation.run()
        choices = [
            {
                **self._choice(index, answer.tokens),
                "message": self._messages[index].whole(answer.text),
                "finish_reason": self._finish_reason(index, answer.finish),
            }
            for index, answer in enumerate(self._generation.answers)
        ]
        counted = {"usage": usage([self._generation])}
        return self._envelope.record("chat.completion", choices, **counted, **self._prompt())

    def pieces(self) -> Iterator[list[Record]]:
        """Of each choice the role with its first tokens, contents and calls, and why it ended.

        Last the usage.
        """
        begun: set[int] = set()
        for news in self._generation.news():
            records = [] if news.index in begun else [self._chunk(news.index, _ROLE)]
            begun.add(news.index)
            records += self._chunks(news)
            if news.finish is not None:
                reason = self._finish_reason(news.index, news.finish)
                records.append(self._chunk(news.index, {}, finish_reason=reason))
            yield records
        if self._request.include_usage:
            yield [self._record([], usage([self._generation]))]

    def failure(self, failure: Failure) -> Record:
        return failure.as_openai()

    def abort(self) -> None:
        self._generation.abort()

    def _chunks(self, news: News) -> list[Record]:
        text = "".join(token.text for token in news.tokens)
        deltas = self._messages[news.index].deltas(text, is_last=news.finish is not None)
        if self._request.logprobs and not deltas:
            deltas.append({})  # the tokens have logprobs, if no text yet
        chunks = [self._chunk(news.index, delta) for delta in deltas[:-1]]
        return chunks + [self._chunk(news.index, delta, news.tokens) for delta in deltas[-1:]]

    def _finish_reason(self, index: int, finish: Finish | None) -> str | None:
        reason = finish_reason(finish)
        is_call = reason == "stop" and self._messages[index].has_calls
        return "tool_calls" if is_call else reason

    def _chunk(
        self,
        index: int,
        delta: Record,
        tokens: Sequence[TokenText] = (),
        finish_reason: str | None = None,
    ) -> Record:
        choice = {**self._choice(index, tokens), "delta": delta, "finish_reason": finish_reason}
        return self._record([choice])

    def _record(self, choices: Sequence[Record], usage: Record | None = None) -> Record:
        counted = {"usage": usage} if self._request.include_usage else {}
        return self._envelope.record("chat.completion.chunk", choices, **counted)

    def _choice(self, index: int, tokens: Sequence[TokenText]) -> Record:
        if not self._request.logprobs or not tokens:
            return {"index": index, "logprobs": None}
        return {"index": index, "logprobs": chat_logprobs(tokens, self._tokenizer)}

    def _prompt(self) -> Record:
        """vLLM's `prompt_logprobs`, where they are asked for."""
        if self._request.decoding.params.prompt_logprobs is None:
            return {}
        prompt, scores = self._generation.prompt_token_ids, self._generation.prompt_scores
        return {"prompt_logprobs": prompt_logprobs(prompt, scores, self._tokenizer)}


_ROLE: Record = {"role": "assistant", "content": ""}
