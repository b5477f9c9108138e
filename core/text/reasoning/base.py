"""The interface of the reasoning parsers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A part of the text in which the model reasons before it answers."""

    text: str


class ReasoningParser(Protocol):
    """Separates one answer into reasoning and the rest while it streams.

    The rest, as str, is content and tool calls, in the model's own format.
    """

    special_tokens: Sequence[str]
    """Special tokens of the format. Detokenization must keep them."""
    is_inside: bool
    """Whether the text so far ends inside the reasoning."""

    def push(self, text: str) -> list[Reasoning | str]:
        """Add text and return the parts that can no longer change, in order."""
        ...

    def flush(self) -> list[Reasoning | str]:
        """Return the parts that are still held back at the end of the answer."""
        ...
