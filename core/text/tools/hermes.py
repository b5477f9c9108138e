"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from core.text.tools.base import SectionParser, ToolCall, decode_json, tool_call

_END = "</tool_call>"


class HermesParser(SectionParser):
    """Each section holds one call."""

    mark = "<tool_call>"

    def take(self, section: str, *, is_last: bool) -> tuple[list[ToolCall], str] | None:
        end = section.find(_END)
        if end < 0 and not is_last:
            return None
        inside, _, rest = section.partition(_END)
        value, end = decode_json(inside.strip())
        if end < len(inside.strip()):
            raise ValueError("more than a call")
        return [tool_call(value)], rest
