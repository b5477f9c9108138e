"""Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or from tokenizer version 11 on
`[TOOL_CALLS]name[ARGS]{...}` for each call.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import cast

from core.text.tools.base import SectionParser, ToolCall, decode_json, tool_call
from core.text.tools.notation import Notation, json_head

_NAME = re.compile(r"\s*(?P<name>[\w.-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{)")


class MistralParser(SectionParser):
    """Parses sections, each of which ends with the end of its JSON."""

    mark = "[TOOL_CALLS]"
    special_tokens: Sequence[str] = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

    def notation(self, special_tokens: Collection[str]) -> Notation:
        if "[ARGS]" in special_tokens:
            return Notation(lambda name: f"{self.mark}{name}[ARGS]", "", "")
        return Notation(json_head("arguments"), "}", ", ", opening=f"{self.mark}[", closing="]")

    def take(self, section: str, *, is_last: bool) -> tuple[list[ToolCall], str] | None:
        start = section.find("[" if section.lstrip().startswith("[") else "{")
        if not is_last and (start < 0 or self.brackets.end(section, start) is None):
            return None
        return _take(section)


def _take(section: str) -> tuple[list[ToolCall], str]:
    named = _NAME.match(section)
    start = named.end() if named else len(section) - len(section.lstrip())
    value, end = decode_json(section, start)
    if named:
        return [tool_call({"name": named["name"], "arguments": value})], section[end:]
    if not isinstance(value, list) or not value:
        raise ValueError("not a list of calls")
    return [tool_call(call) for call in cast(list[object], value)], section[end:]
