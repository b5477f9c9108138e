"""Responses to OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Sequence

from container.apis.chat.message import ChoiceMessage
from container.apis.chat.schema import ChatRequest
from container.apis.generation.generation import Generation
from container.apis.generation.logprobs import chat_logprobs
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
from core.text.answer import AnswerText, TokenText
from core.text.answers import Delta
from core.text.tokenizer import Tokenizer

_ROLE: Record = {"role": "assistant", "content": ""}
"""The first delta of each choice."""
_RUNNING: Record = {"finish_reason": None}
_NOTHING: Record = {}


class ChatFormat(Format):
    """Writes answers as chat completions, with one choice per answer.

    The chunks of a choice are its role, then text and tool calls, then its finish reason.
    """

    ends_with_done = True

    def __init__(
        self,
        generation: Generation,
        request: ChatRequest,
        envelope: Envelope,
        tokenizer: Tokenizer,
        messages: Sequence[ChoiceMessage],
    ) -> None:
        """messages: one per choice."""
        self._generation = generation
        self._request = request
        self._envelope = envelope
        self._chunks = Chunks(envelope, "chat.completion.chunk")
        self._tokenizer = tokenizer
        self._name = request.response_options.token_namer(tokenizer)
        self._messages = messages
        options = request.response_options
        self._has_details = request.logprobs or options.shows_token_ids
        self._text_chunks: dict[int, TextChunk] = {}
        """By choice, unless its chunks differ in more than their text."""

    def document(self) -> object:
        options = self._request.response_options
        choices = [
            {
                **self._choice(index, answer.tokens),
                "message": self._message(index, answer.tokens),
                **self._end(index, answer),
            }
            for index, answer in enumerate(self._generation.answers)
        ]
        return self._envelope.record(
            "chat.completion",
            choices=choices,
            usage=self._usage(),
            **options.document_fields(self._generation, self._tokenizer),
            **options.prompt_fields(self._generation),
        )

    def begin(self, index: int) -> Sequence[StreamRecord]:
        prompt = self._request.response_options.prompt_fields(self._generation)
        first = self._chunk(index, _ROLE, more=prompt)
        echo = self._request.echo
        if not (self._has_details or self._request.stream_usage.is_continuous):
            self._text_chunks[index] = TextChunk(lambda t: self._chunk(index, {"content": t}))
        return [first, self._chunk(index, {"content": echo})] if echo else [first]

    def delta(self, delta: Delta) -> Sequence[StreamRecord]:
        """Return the chunks with a delta's text and tool calls. The last chunk has the logprobs."""
        message = self._messages[delta.index]
        parts = message.deltas(delta.tokens, is_last=delta.finish is not None)
        if self._has_details and not parts:
            parts.append({})  # a chunk without text, for the tokens' logprobs or ids
        write = self._text_chunks.get(delta.index)
        if write and len(parts) == 1 and isinstance(text := parts[0].get("content"), str):
            return [write(text)]
        chunks = [self._chunk(delta.index, part) for part in parts[:-1]]
        return chunks + [self._chunk(delta.index, part, delta.tokens) for part in parts[-1:]]

    def end(self, index: int) -> Sequence[StreamRecord]:
        end = self._end(index, self._generation.answers[index])
        return [self._chunk(index, {}, end=end)]

    def last(self) -> Sequence[StreamRecord]:
        if not self._request.stream_usage.is_included:
            return []
        return [self._chunks.chunk([], usage=self._usage())]

    def failure(self, failure: Failure) -> Record:
        return openai_error(failure)

    def _message(self, index: int, tokens: Sequence[TokenText]) -> Record:
        message, echo = self._messages[index].full(tokens), self._request.echo
        return {**message, "content": f"{echo}{message['content'] or ''}"} if echo else message

    def _end(self, index: int, answer: AnswerText) -> Record:
        """Return the fields that say why an answer has ended.

        A call to a function that the request names ends with `stop`, as in OpenAI's API.
        """
        reason = finish_reason(answer.finish)
        chose_call = self._messages[index].has_calls and not self._request.names_function
        if reason == "stop" and chose_call:
            reason = "function_call" if self._request.uses_functions else "tool_calls"
        return {"finish_reason": reason, "stop_reason": answer.stop_reason}

    def _chunk(
        self,
        index: int,
        delta: Record,
        tokens: Sequence[TokenText] = (),
        end: Record = _RUNNING,
        more: Record = _NOTHING,
    ) -> bytes:
        choice = {**self._choice(index, tokens), "delta": delta, **end}
        usage_field = self._request.stream_usage.field(self._usage)
        return self._chunks.chunk([choice], **usage_field, **more)

    def _usage(self) -> Record:
        has_receipt = self._request.stream_usage.has_receipt
        counts = usage([self._generation], has_receipt=has_receipt)
        num_reasoning = sum(message.num_reasoning_tokens for message in self._messages)
        if not num_reasoning:
            return counts
        return {**counts, "completion_tokens_details": {"reasoning_tokens": num_reasoning}}

    def _choice(self, index: int, tokens: Sequence[TokenText]) -> Record:
        shows = self._request.logprobs and tokens
        logprobs = {"content": chat_logprobs(tokens, self._name)} if shows else None
        return {
            "index": index,
            "logprobs": logprobs,
            **self._request.response_options.answer_fields(tokens),
        }
