"""Splits an answer of a chat into its pieces as tokens arrive: content and tool calls."""

from __future__ import annotations

from collections.abc import Sequence

from core.text.answer import TokenText
from core.text.tools.base import Piece, ToolParser


class AnswerParser:
    """Parses one answer. Without a tool parser, all of it is content."""

    def __init__(self, tools: ToolParser | None) -> None:
        self._tools = tools

    def push(self, tokens: Sequence[TokenText], *, is_last: bool) -> list[Piece]:
        """Add tokens and return the pieces that are certain by now; all of them if `is_last`."""
        text = "".join(token.text for token in tokens)
        if self._tools is None:
            return [text] if text else []
        pieces = self._tools.push(text)
        return [*pieces, *self._tools.flush()] if is_last else pieces
