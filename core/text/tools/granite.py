"""Granite 3: `<|tool_call|>[{"name": ..., "arguments": {...}}]`; 3.1 writes `<tool_call>[...]`."""

from __future__ import annotations

from collections.abc import Sequence

from core.text.tools.json_list import JsonListParser


class GraniteParser(JsonListParser):
    mark = "<|tool_call|>"
    other_marks = ("<tool_call>",)
    special_tokens: Sequence[str] = (mark,)
