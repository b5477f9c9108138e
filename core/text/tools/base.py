"""The interface and common code of the tool call parsers."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from core.text.stopping import partial_match_length
from core.text.tools.brackets import Brackets
from core.text.tools.notation import Notation


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function that the model requests."""

    name: str
    arguments: str
    """A JSON object, as text."""
    id: str = ""
    """The id that the model has written; '' if its format has none."""


def call_id(seed: str) -> str:
    """Return an id for a call, a hash of `seed`.

    Mistral's chat templates accept only ids of nine letters and digits.
    """
    return hashlib.sha256(seed.encode()).hexdigest()[:9]


Piece = str | ToolCall


class ToolParser(Protocol):
    """Splits one answer into text and calls while it streams. An invalid call stays text."""

    special_tokens: Sequence[str]
    """Special tokens of the format. Detokenization must keep them."""

    def notation(self, special_tokens: Collection[str]) -> Notation | None:
        """Return how a model writes calls if its vocabulary has these special tokens.

        None if the format does not write arguments as JSON.
        """
        ...

    def push(self, text: str) -> list[Piece]:
        """Add text and return the texts and calls that are certain by now, in order."""
        ...

    def flush(self) -> list[Piece]:
        """Return the texts and calls that are still held back at the end of the answer."""
        ...


class SectionParser(ABC):
    """Base class for formats where a mark opens a section of calls.

    ```
    text text  <mark> section  text  <mark> section
    ```
    """

    mark: str
    other_marks: Sequence[str] = ()
    """Marks of other versions of the format."""
    special_tokens: Sequence[str] = ()

    def __init__(self) -> None:
        self._held = ""
        self._marks = (self.mark, *self.other_marks)
        self._found = self.mark
        self._in_section = False
        self._has_called = False
        self.brackets = Brackets()
        """Finds the end of the first bracket of the current section."""

    @abstractmethod
    def notation(self, special_tokens: Collection[str]) -> Notation | None:
        """See `ToolParser.notation`."""

    @abstractmethod
    def take(self, section: str, *, is_last: bool) -> tuple[list[ToolCall], str] | None:
        """Parse a section. Returns its calls and the text after it; None if it is incomplete.

        is_last: no more text will come. Raises ValueError if the text is not a section.
        """

    def push(self, text: str) -> list[Piece]:
        self._held += text
        return self._advance(is_last=False)

    def flush(self) -> list[Piece]:
        pieces = self._advance(is_last=True)
        # Whitespace after calls is part of the format.
        rest = "" if self._has_called and not self._held.strip() else self._held
        self._held = ""
        return [*pieces, rest] if rest else pieces

    def _advance(self, *, is_last: bool) -> list[Piece]:
        pieces: list[Piece] = []
        while True:
            if not self._in_section:
                pieces += self._text_before_mark()
            if not self._in_section:
                return pieces
            spaces, _, section = self._held.partition(self._found)
            try:
                taken = self.take(section, is_last=is_last)
            except ValueError:
                pieces.append(spaces + self._found)
                self._held = section
            else:
                if taken is None:
                    return pieces
                calls, self._held = taken
                pieces += calls
                self._has_called = True
            self._in_section = False
            self.brackets = Brackets()

    def _text_before_mark(self) -> list[Piece]:
        """Release what is certainly text. Hold back trailing spaces: they may precede a mark."""
        found = [(at, mark) for mark in self._marks if (at := self._held.find(mark)) >= 0]
        self._in_section = bool(found)
        if found:
            end, self._found = min(found)
        else:
            end = len(self._held) - partial_match_length(self._held, self._marks)
        text = self._held[:end].rstrip()
        self._held = self._held[len(text) :]
        return [text] if text else []


class _Call(msgspec.Struct):
    name: str
    arguments: dict[str, Any] | None = None
    parameters: dict[str, Any] | None = None


def tool_call(value: object) -> ToolCall:
    """Convert decoded JSON to a call. Raises ValueError if it is not one."""
    call = msgspec.convert(value, _Call)
    arguments = call.parameters if call.arguments is None else call.arguments
    if arguments is None:
        raise ValueError("a call needs arguments")
    return ToolCall(call.name, msgspec.json.encode(arguments).decode())


def decode_json(text: str, start: int = 0) -> tuple[object, int]:
    """Return the JSON value at `start`, and its end. Raises ValueError if there is none."""
    try:
        return json.JSONDecoder().raw_decode(text, start)
    except RecursionError:
        raise ValueError("nested too deeply") from None
