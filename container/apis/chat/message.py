"""The message of one chat choice: its content, and the tool calls found in the answer's text."""

from __future__ import annotations

import hashlib

from container.apis.generation.response import Record
from core.text.tools.base import Piece, ToolCall, ToolParser


class Message:
    """Splits a choice's text into content and tool calls as it arrives."""

    def __init__(self, parser: ToolParser | None, seed: str) -> None:
        """The ids of tool calls are hashes of `seed`."""
        self._parser = parser
        self._seed = seed
        self._num_calls = 0

    @property
    def has_calls(self) -> bool:
        """Whether the text so far has a tool call."""
        return self._num_calls > 0

    def full(self, text: str) -> Record:
        """Return the message for the complete text."""
        pieces = self._parse(text, is_last=True)
        content = "".join(piece for piece in pieces if isinstance(piece, str))
        calls = [self._call(piece) for piece in pieces if isinstance(piece, ToolCall)]
        message: Record = {"role": "assistant", "content": content}
        return message | {"content": content or None, "tool_calls": calls} if calls else message

    def deltas(self, text: str, *, is_last: bool) -> list[Record]:
        """Return the deltas for the next part of the text; `is_last` says that it is the last."""
        return [self._delta(piece) for piece in self._parse(text, is_last=is_last)]

    def _delta(self, piece: Piece) -> Record:
        if isinstance(piece, str):
            return {"content": piece}
        return {"tool_calls": [{"index": self._num_calls, **self._call(piece)}]}

    def _parse(self, text: str, *, is_last: bool) -> list[Piece]:
        if self._parser is None:
            return [text] if text else []
        pieces = self._parser.push(text)
        return [*pieces, *self._parser.flush()] if is_last else pieces

    def _call(self, call: ToolCall) -> Record:
        seed = f"{self._seed} {self._num_calls}".encode()
        self._num_calls += 1
        # Mistral's chat templates accept only ids of nine letters and digits.
        id = hashlib.sha256(seed).hexdigest()[:9]
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": id, "type": "function", "function": function}
