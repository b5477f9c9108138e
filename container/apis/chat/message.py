"""The message of one choice of a chat: contents, and the calls of functions found in its text."""

from __future__ import annotations

import hashlib

from container.apis.generation.answer import Record
from core.text.tools.base import Piece, ToolCall, ToolParser


class Message:
    """Takes the text of a choice apart as it comes."""

    def __init__(self, parser: ToolParser | None, seed: str) -> None:
        """The ids of calls are made of `seed`."""
        self._parser = parser
        self._seed = seed
        self._num_calls = 0

    @property
    def has_calls(self) -> bool:
        """Whether there was a call so far."""
        return self._num_calls > 0

    def whole(self, text: str) -> Record:
        """The message that all of the text makes."""
        pieces = self._taken_apart(text, is_last=True)
        content = "".join(each for each in pieces if isinstance(each, str))
        calls = [self._call(each) for each in pieces if isinstance(each, ToolCall)]
        message: Record = {"role": "assistant", "content": content}
        return message | {"content": content or None, "tool_calls": calls} if calls else message

    def deltas(self, text: str, *, is_last: bool) -> list[Record]:
        """What more of the text adds to the message. `is_last`: no more will come."""
        return [self._delta(piece) for piece in self._taken_apart(text, is_last=is_last)]

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
        seed = f"{self._seed} {self._num_calls}".encode()
        self._num_calls += 1
        # Nine letters and digits, since Mistral's templates take nothing else.
        id = hashlib.sha256(seed).hexdigest()[:9]
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": id, "type": "function", "function": function}
