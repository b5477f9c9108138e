"""What the parsers of tool calls share."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from core.text.stopping import num_doubtful
from core.text.tools.notation import Notation


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model asks to be called."""

    name: str
    arguments: str
    """A JSON object."""


Piece = str | ToolCall


class ToolParser(Protocol):
    """Takes an answer apart as it comes. Nothing is lost: what is no call after all is text."""

    special_tokens: Sequence[str]
    """Special tokens that are part of the notation, and so must be part of the text."""

    def notation(self, special_tokens: Collection[str]) -> Notation:
        """How a model writes calls whose vocabulary has these of the special tokens."""
        ...

    def push(self, text: str) -> list[Piece]:
        """The texts and calls that are certain by now, in their order."""
        ...

    def flush(self) -> list[Piece]:
        """What is left at the end of the answer."""
        ...


class SectionParser(ABC):
    """Base of the notations in which a mark opens a section of calls.

    ```
    text text  <mark> section  text  <mark> section
    ```
    """

    mark: str
    special_tokens: Sequence[str] = ()

    def __init__(self) -> None:
        self._held = ""
        self._in_section = False
        self._has_called = False

    @abstractmethod
    def notation(self, special_tokens: Collection[str]) -> Notation:
        """As `ToolParser` says."""

    @abstractmethod
    def take(self, section: str, *, is_last: bool) -> tuple[list[ToolCall], str] | None:
        """The calls of a section and the text after it; None while it is not whole.

        Raises ValueError where it is no section at all. `is_last`: no more text will come.
        """

    def push(self, text: str) -> list[Piece]:
        self._held += text
        return self._advance(is_last=False)

    def flush(self) -> list[Piece]:
        pieces = self._advance(is_last=True)
        # Blanks after calls are part of the notation.
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
            blanks, _, section = self._held.partition(self.mark)
            try:
                taken = self.take(section, is_last=is_last)
            except ValueError:
                pieces.append(blanks + self.mark)
                self._held = section
            else:
                if taken is None:
                    return pieces
                calls, self._held = taken
                pieces += calls
                self._has_called = True
            self._in_section = False

    def _text_before_mark(self) -> list[Piece]:
        """Releases what is text for certain: not blanks at its end, which may precede a mark."""
        at = self._held.find(self.mark)
        self._in_section = at >= 0
        end = at if self._in_section else len(self._held) - num_doubtful(self._held, [self.mark])
        text = self._held[:end].rstrip()
        self._held = self._held[len(text) :]
        return [text] if text else []


class _Call(msgspec.Struct):
    name: str
    arguments: dict[str, Any] | None = None
    parameters: dict[str, Any] | None = None


def tool_call(value: object) -> ToolCall:
    """The call that decoded JSON describes. Raises ValueError where it describes none."""
    call = msgspec.convert(value, _Call)
    arguments = call.parameters if call.arguments is None else call.arguments
    if arguments is None:
        raise ValueError("a call has arguments")
    return ToolCall(call.name, msgspec.json.encode(arguments).decode())


def decode_json(text: str, start: int = 0) -> tuple[object, int]:
    """The JSON value that begins there, and where it ends. Raises ValueError where none does."""
    try:
        return json.JSONDecoder().raw_decode(text, start)
    except RecursionError:
        raise ValueError("nested too deeply") from None
