"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from core.text.tools.base import SectionParser, ToolCall, decode_json, tool_call
from core.text.tools.notation import Notation, json_head

_BEGIN = "<tool_call>"
_END = "</tool_call>"


class HermesParser(SectionParser):
    """Each section holds one call."""

    mark = _BEGIN
    special_tokens: Sequence[str] = (_BEGIN, _END)

    def notation(self, special_tokens: Collection[str]) -> Notation:
        begin = json_head("arguments")
        return Notation(lambda name: f"{_BEGIN}\n{begin(name)}", f"}}\n{_END}", "\n")

    def take(self, section: str, *, is_last: bool) -> tuple[list[ToolCall], str] | None:
        end = section.find(_END)
        if end < 0 and not is_last:
            return None
        inside, _, rest = section.partition(_END)
        value, end = decode_json(inside.strip())
        if end < len(inside.strip()):
            raise ValueError("text after the call")
        return [tool_call(value)], rest
