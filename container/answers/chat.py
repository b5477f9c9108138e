"""OpenAI's chat completions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from container.answers.answer import Record
from container.answers.openai import Envelope, finish_reason, usage
from container.failures import Failure
from container.generation import Generation
from container.schemas.chat import ChatRequest
from core.text.answer import TokenText
from core.text.tools.base import Piece, ToolCall, ToolParser


class ChatAnswer:
    """One message, with the calls of functions that `parser` finds in its text."""

    ends_with_done = True

    def __init__(
        self,
        generation: Generation,
        request: ChatRequest,
        envelope: Envelope,
        parser: ToolParser | None = None,
    ) -> None:
        self._generation = generation
        self._request = request
        self._envelope = envelope
        self._parser = parser
        self._num_calls = 0

    def whole(self) -> object:
        """The `chat.completion`."""
        self._generation.run()
        pieces = self._taken_apart(self._generation.text, is_last=True)
        content = "".join(each for each in pieces if isinstance(each, str))
        calls = [self._call(each) for each in pieces if isinstance(each, ToolCall)]
        message: Record = {"role": "assistant", "content": content}
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        choice = {**self._choice(self._generation.tokens), "message": message}
        choice["finish_reason"] = self._finish_reason()
        return self._envelope.record("chat.completion", [choice], usage=usage([self._generation]))

    def pieces(self) -> Iterator[list[Record]]:
        """The role with the first tokens, contents and calls, why it ended, and the usage."""
        is_first = True
        for batch in self._generation.batches():
            records = [self._chunk({"role": "assistant", "content": ""})] if is_first else []
            is_first = False
            yield records + self._chunks(batch)
        yield [self._chunk({}, finish_reason=self._finish_reason())]
        if self._request.include_usage:
            yield [self._record([], usage([self._generation]))]

    def failure(self, failure: Failure) -> Record:
        return failure.as_openai()

    def abort(self) -> None:
        self._generation.abort()

    def _chunks(self, batch: Sequence[TokenText]) -> list[Record]:
        text = "".join(token.text for token in batch)
        pieces = self._taken_apart(text, is_last=self._generation.finish is not None)
        deltas: list[Record] = [self._delta(piece) for piece in pieces]
        if self._request.logprobs and not deltas:
            deltas.append({})  # the tokens have logprobs, if no text yet
        chunks = [self._chunk(delta) for delta in deltas[:-1]]
        return [*chunks, *(self._chunk(delta, batch) for delta in deltas[-1:])]

    def _delta(self, piece: Piece) -> Record:
        if isinstance(piece, str):
            return {"content": piece}
        return {"tool_calls": [{"index": self._num_calls, **self._call(piece)}]}

    def _taken_apart(self, text: str, *, is_last: bool) -> list[Piece]:
        if self._parser is None:
            return [text] if text else []
        pieces = self._parser.push(text)
        return [*pieces, *self._parser.flush()] if is_last else pieces

    def _call(self, call: ToolCall) -> Record:
        seed = f"{self._envelope.id} {self._num_calls}".encode()
        self._num_calls += 1
        # Nine letters and digits, since Mistral's templates take nothing else.
        id = hashlib.sha256(seed).hexdigest()[:9]
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": id, "type": "function", "function": function}

    def _finish_reason(self) -> str | None:
        reason = finish_reason(self._generation)
        return "tool_calls" if self._num_calls and reason == "stop" else reason

    def _chunk(
        self, delta: Record, tokens: Sequence[TokenText] = (), finish_reason: str | None = None
    ) -> Record:
        choice = {**self._choice(tokens), "delta": delta, "finish_reason": finish_reason}
        return self._record([choice])

    def _record(self, choices: Sequence[Record], usage: Record | None = None) -> Record:
        counted = {"usage": usage} if self._request.include_usage else {}
        return self._envelope.record("chat.completion.chunk", choices, **counted)

    def _choice(self, tokens: Sequence[TokenText]) -> Record:
        if not self._request.logprobs or not tokens:
            return {"index": 0, "logprobs": None}
        return {"index": 0, "logprobs": {"content": [_logprob(token) for token in tokens]}}


def _logprob(token: TokenText) -> Record:
    return {
        "token": token.text,
        "logprob": token.logprob,
        "bytes": list(token.text.encode()),
        "top_logprobs": [],
    }
