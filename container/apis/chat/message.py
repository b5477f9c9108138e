"""The message of one chat choice: its content, and the tool calls found in the answer's text."""

from __future__ import annotations

import hashlib

from container.apis.generation.response import Record
from core.text.tools.base import Piece, ToolCall, ToolParser


class Message:
    """Splits a choice's text into content and tool calls as it arrives."""

    def __init__(
        self, parser: ToolParser | None, seed: str, *, uses_functions: bool = False
    ) -> None:
        """The ids of tool calls are hashes of `seed`.

        With `uses_functions` the first call is OpenAI's former `function_call`, and the others,
        which that format cannot hold, are left out.
        """
        self._parser = parser
        self._uses_functions = uses_functions
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
        if not calls:
            return message
        message["content"] = content or None
        if self._uses_functions:
            return {**message, "function_call": calls[0]["function"]}
        return {**message, "tool_calls": calls}

    def deltas(self, text: str, *, is_last: bool) -> list[Record]:
        """Return the deltas for the next part of the text; `is_last` says that it is the last."""
        deltas = [self._delta(piece) for piece in self._parse(text, is_last=is_last)]
        return [delta for delta in deltas if delta]

    def _delta(self, piece: Piece) -> Record:
        if isinstance(piece, str):
            return {"content": piece}
        index, call = self._num_calls, self._call(piece)
        if self._uses_functions:
            return {} if index else {"function_call": call["function"]}
        return {"tool_calls": [{"index": index, **call}]}

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
