"""gpt-oss: a call is a message of harmony that is addressed to a function.

`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`

The rest of harmony is read by core/text/reasoning/harmony.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from core.text.tools.base import SectionParser, ToolCall, decode_json, tool_call
from core.text.tools.notation import Notation

_END = "<|call|>"
_HEADER = re.compile(r"(?P<name>[^\n]+?)\s*(?:(?:<\|constrain\|>)?json)?\s*<\|message\|>")


class OpenAIParser(SectionParser):
    """Each section is one call."""

    mark = "<|channel|>commentary to=functions."
    special_tokens: Sequence[str] = ("<|channel|>", "<|constrain|>", "<|message|>", _END)

    def notation(self, special_tokens: Collection[str]) -> Notation:
        return Notation(lambda name: f"{self.mark}{name} <|constrain|>json<|message|>", "", "")

    def take(self, section: str, *, is_last: bool) -> tuple[list[ToolCall], str] | None:
        header = _HEADER.match(section)
        try:
            if header is None:
                raise ValueError("no header")
            value, end = decode_json(section, header.end())
        except ValueError:
            if is_last or _END in section:
                raise
            return None  # incomplete
        rest = section[end:].lstrip()
        if _END.startswith(rest) and rest != _END and not is_last:
            return None
        return [tool_call({"name": header["name"], "arguments": value})], rest.removeprefix(_END)
