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
_MESSAGE = "<|message|>"
_HEADER = re.compile(r"(?P<name>[^\n]+?)\s*+(?:(?:<\|constrain\|>)?json)?\s*+")
_MAX_HEADER = 1024
"""A header has fewer characters, including the mark at its end."""


class OpenAIParser(SectionParser):
    """Each section is one call."""

    mark = "<|channel|>commentary to=functions."
    special_tokens: Sequence[str] = ("<|channel|>", "<|constrain|>", "<|message|>", _END)

    def notation(self, special_tokens: Collection[str]) -> Notation:
        return Notation(lambda name: f"{self.mark}{name} <|constrain|>json<|message|>", "", "")

    def take(self, section: str, *, is_last: bool) -> tuple[list[ToolCall], str] | None:
        begin = section.find(_MESSAGE, 0, _MAX_HEADER)
        start = begin + len(_MESSAGE)
        if not (is_last or _END in section) and self._is_incomplete(section, begin, start):
            return None
        header = _HEADER.fullmatch(section[:begin]) if begin >= 0 else None
        if header is None:
            raise ValueError("no header")
        value, end = decode_json(section, start)
        rest = section[end:].lstrip()
        return [tool_call({"name": header["name"], "arguments": value})], rest.removeprefix(_END)

    def _is_incomplete(self, section: str, begin: int, start: int) -> bool:
        """begin, start: where the mark before the arguments begins, and where it ends."""
        if begin < 0:
            return len(section) < _MAX_HEADER
        end = self.brackets.end(section, start)
        return end is None or _END.startswith(section[end:].lstrip())
