"""Formats in which a list follows a mark: `MARK[{"name": ..., "arguments": {...}}, ...]`.

Granite 3 writes `<|tool_call|>[...]`, Granite 3.1 `<tool_call>[...]`, and Phi 4 mini
`functools[...]`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import cast

from core.text.tools.base import SectionParser, ToolCall, decode_json, tool_call
from core.text.tools.notation import Notation, json_head


class _JsonListParser(SectionParser):
    """A section ends where its JSON list ends."""

    def notation(self, special_tokens: Collection[str]) -> Notation:
        return Notation(json_head("arguments"), "}", ", ", opening=f"{self.mark}[", closing="]")

    def take(self, section: str, *, is_last: bool) -> tuple[list[ToolCall], str] | None:
        start = len(section) - len(section.lstrip())
        if start < len(section) and section[start] != "[":
            raise ValueError("not a list")
        if not is_last and self.brackets.end(section, start) is None:
            return None
        value, end = decode_json(section, start)
        if not value:
            raise ValueError("no calls")
        return [tool_call(call) for call in cast(list[object], value)], section[end:]


class GraniteParser(_JsonListParser):
    mark = "<|tool_call|>"
    other_marks = ("<tool_call>",)
    special_tokens: Sequence[str] = (mark,)


class Phi4MiniParser(_JsonListParser):
    mark = "functools"
