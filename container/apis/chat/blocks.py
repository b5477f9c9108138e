"""The blocks of an answer, as Anthropic's messages and OpenAI's responses return and stream them.

A block is a run of reasoning, a run of content, or one tool call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from container.apis.generation.reply import Record
from core.text.answer_parser import AnswerPiece
from core.text.reasoning.base import Reasoning
from core.text.tools.base import ToolCall

BlockKind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class Block:
    """One block, complete or still growing."""

    index: int
    """Number of blocks before this one."""
    kind: BlockKind
    name: str = ""
    """The function of a call."""
    call_id: str = ""
    """See `ToolCall.id`."""
    parts: list[str] = field(default_factory=list[str])
    """Parts of the text, or of a call's arguments."""

    @property
    def text(self) -> str:
        """The text so far; for a call, its arguments."""
        return "".join(self.parts)


class BlockEvents(Protocol):
    """Formats the life of a block as records of a stream."""

    def start_records(self, block: Block) -> list[Record]: ...

    def delta_records(self, block: Block, text: str) -> list[Record]: ...

    def stop_records(self, block: Block) -> list[Record]: ...


class Blocks:
    """Collects the pieces of one answer in blocks."""

    def __init__(self, events: BlockEvents) -> None:
        self._events = events
        self._open: Block | None = None
        self.all: list[Block] = []

    @property
    def has_calls(self) -> bool:
        return any(block.kind == "call" for block in self.all)

    def push(self, pieces: Sequence[AnswerPiece], *, is_last: bool) -> list[Record]:
        """Add pieces and return the records for them. `is_last` closes the last block."""
        records: list[Record] = []
        for piece in pieces:
            block, text = self._open, _text(piece)
            if block is None or isinstance(piece, ToolCall) or block.kind != _kind(piece):
                records += self._close()
                block = self._start(piece)
                records += self._events.start_records(block)
            block.parts.append(text)
            records += self._events.delta_records(block, text)
        return records + self._close() if is_last else records

    def _start(self, piece: AnswerPiece) -> Block:
        block = self._open = Block(len(self.all), _kind(piece))
        if isinstance(piece, ToolCall):
            block.name, block.call_id = piece.name, piece.id
        self.all.append(block)
        return block

    def _close(self) -> list[Record]:
        block, self._open = self._open, None
        return [] if block is None else self._events.stop_records(block)


def _kind(piece: AnswerPiece) -> BlockKind:
    if isinstance(piece, ToolCall):
        return "call"
    return "reasoning" if isinstance(piece, Reasoning) else "text"


def _text(piece: AnswerPiece) -> str:
    if isinstance(piece, ToolCall):
        return piece.arguments
    return piece.text if isinstance(piece, Reasoning) else piece
