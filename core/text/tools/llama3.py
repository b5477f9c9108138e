"""Llama 3: the whole answer is calls, `{"name": ..., "parameters": {...}}; {...}`, or text."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from core.text.tools.base import Piece, decode_json, tool_call
from core.text.tools.brackets import Brackets
from core.text.tools.notation import Notation, json_head

_PYTHON_TAG = "<|python_tag|>"
_BETWEEN = " \t\r\n;"


class Llama3Parser:
    """Parses calls at the start of the answer. Once anything else comes, the rest is text."""

    special_tokens: Sequence[str] = (_PYTHON_TAG,)

    def __init__(self) -> None:
        self._held = ""
        self._is_text = False
        self._has_called = False
        self._brackets = Brackets()

    def notation(self, special_tokens: Collection[str]) -> Notation:
        return Notation(json_head("parameters"), "}", "; ")

    def push(self, text: str) -> list[Piece]:
        self._held += text
        if self._is_text:
            return self._release()
        start = self._held.lstrip().removeprefix(_PYTHON_TAG).lstrip(_BETWEEN)
        if start and not start.startswith("{") and not _PYTHON_TAG.startswith(start):
            return self._release()
        return self._calls(start)

    def flush(self) -> list[Piece]:
        is_separator = self._has_called and not self._held.strip(_BETWEEN)
        return [] if is_separator else self._release()

    def _calls(self, rest: str) -> list[Piece]:
        """Return the complete calls, and remove them from the held text."""
        calls: list[Piece] = []
        while rest.startswith("{") and self._brackets.end(rest) is not None:
            self._brackets = Brackets()
            try:
                value, end = decode_json(rest)
                calls.append(tool_call(value))
            except ValueError:
                return [*calls, *self._release()]
            self._has_called = True
            self._held = rest[end:]
            rest = self._held.lstrip(_BETWEEN)
        return calls

    def _release(self) -> list[Piece]:
        self._is_text = True
        released, self._held = self._held, ""
        return [released] if released else []
