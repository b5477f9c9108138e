"""Splits an answer of a chat into its pieces as tokens arrive: reasoning, content, tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from core.text.answer import TokenText, text_of
from core.text.reasoning.base import Reasoning, ReasoningParser
from core.text.tools.base import ToolCall, ToolParser
from core.text.tools.response_template.parser import ResponseParser

AnswerPiece = Reasoning | str | ToolCall
"""A str is content."""


class AnswerParser:
    """Parses one answer. Reasoning and tool calls for which there is no parser count as content."""

    def __init__(
        self, reasoning: ReasoningParser | ResponseParser | None, tools: ToolParser | None
    ) -> None:
        """A ResponseParser finds the calls too, and needs no ToolParser."""
        self._reasoning = reasoning
        self._tools = tools
        self.num_reasoning_tokens = 0
        """The number of tokens so far after which the answer was still inside its reasoning."""

    @property
    def is_reasoning(self) -> bool:
        """Whether the answer is inside its reasoning after the tokens so far."""
        return self._reasoning is not None and self._reasoning.is_inside

    def push(self, tokens: Sequence[TokenText], *, is_last: bool) -> list[AnswerPiece]:
        """Add tokens and return the pieces that are certain by now; if `is_last`, all pieces."""
        pieces: list[AnswerPiece] = []
        for part in self._separated(tokens, is_last=is_last):
            if isinstance(part, str) and self._tools is not None:
                pieces += self._tools.push(part)
            else:
                pieces.append(part)
        return [*pieces, *self._tools.flush()] if is_last and self._tools else pieces

    def _separated(self, tokens: Sequence[TokenText], *, is_last: bool) -> list[AnswerPiece]:
        """Separate the reasoning from the rest. Adjacent parts of one kind are joined."""
        parser = self._reasoning
        if parser is None:
            text = text_of(tokens)
            return [text] if text else []
        parts: list[AnswerPiece] = []
        for token in tokens:
            parts += parser.push(token.text)
            self.num_reasoning_tokens += parser.is_inside
        return _joined([*parts, *parser.flush()] if is_last else parts)


def _joined(parts: Sequence[AnswerPiece]) -> list[AnswerPiece]:
    joined: list[AnswerPiece] = []
    for kind, run in groupby(parts, key=type):
        if kind is str:
            joined.append("".join(part for part in run if isinstance(part, str)))
        elif kind is Reasoning:
            texts = (part.text for part in run if isinstance(part, Reasoning))
            joined.append(Reasoning("".join(texts)))
        else:
            joined += run
    return joined
