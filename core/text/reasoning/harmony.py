"""Reasoning in harmony, the format of gpt-oss: messages on the channel `analysis`.

```
<|channel|>analysis<|message|> reasoning <|end|>
<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|> {...} <|call|>
<|start|>assistant<|channel|>final<|message|> content <|return|>
```

The prompt ends with `<|start|>assistant`. Calls are passed on with a header and an end, in the form
that core/text/tools/openai.py parses.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from core.text.reasoning.base import Reasoning
from core.text.stopping import partial_match_length

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_HEADER_STARTS = ("<|", "to=", "assistant")
_CUT_HEADER = re.compile(r"\s*(?:assistant)?\s*(?:<\||to=)")
"""How an incomplete header begins. `assistant` alone may also be the first word of bare text."""


class Harmony:
    """Parses one answer, which is one or several messages."""

    special_tokens: Sequence[str] = (
        "<|start|>",
        "<|channel|>",
        "<|constrain|>",
        _MESSAGE,
        *_ENDS[:3],
    )

    def __init__(self) -> None:
        self._held = ""
        self._in_header = True
        self._is_call = False
        self._is_first = True
        self.is_inside = False

    def push(self, text: str) -> list[Reasoning | str]:
        self._held += text
        parts: list[Reasoning | str] = []
        while True:
            is_complete = self._read_header() if self._in_header else self._read_body(parts)
            if not is_complete:
                return parts

    def flush(self) -> list[Reasoning | str]:
        """See `ReasoningParser.flush`. Drops a header without a message."""
        rest, self._held = self._held, ""
        if self._in_header and (not self._is_first or _CUT_HEADER.match(rest)):
            return []
        return self._parts(rest)

    def _read_header(self) -> bool:
        """Read a message's header. Return whether it is complete."""
        start = self._held.lstrip()
        if self._is_first and start and not _may_start_a_header(start):
            self._is_first = self._in_header = False  # a bare text is content
            return True
        header, mark, rest = self._held.partition(_MESSAGE)
        if not mark:
            return False
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        self._is_call = recipient is not None
        self.is_inside = not self._is_call and channel is not None and channel[1] == "analysis"
        self._is_first = self._in_header = False
        prefix = f"<|channel|>commentary to={recipient[1]}{_MESSAGE}" if recipient else ""
        self._held = prefix + rest
        return True

    def _read_body(self, parts: list[Reasoning | str]) -> bool:
        """Add what is certainly the message's text to the parts. Return whether it has ended."""
        found = [(at, end) for end in _ENDS if (at := self._held.find(end)) >= 0]
        if not found:
            keep = partial_match_length(self._held, _ENDS)
            cut = len(self._held) - keep
            parts += self._parts(self._held[:cut])
            self._held = self._held[cut:]
            return False
        at, end = min(found)
        parts += self._parts(self._held[:at] + ("<|call|>" if self._is_call else ""))
        self._held = self._held[at + len(end) :]
        self._in_header, self.is_inside, self._is_call = True, False, False
        return True

    def _parts(self, text: str) -> list[Reasoning | str]:
        if not text:
            return []
        return [Reasoning(text) if self.is_inside else text]


def _may_start_a_header(text: str) -> bool:
    return any(text.startswith(start[: len(text)]) for start in _HEADER_STARTS)
