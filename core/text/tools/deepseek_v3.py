"""DeepSeek V3 and V3.1. In V3, a call also has a type, and a Markdown fence around its arguments.

```
<calls begin><call begin>function<sep>NAME
```json
{...}
```<call end><calls end>
<calls begin><call begin>NAME<sep>{...}<call end><calls end>
```

The marks are written with a fullwidth bar, and U+2581 for a space.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from core.text.tools.base import SectionParser, ToolCall, decode_json, tool_call
from core.text.tools.notation import Notation

_BEGIN, _END = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
_CLOSING = "<\uff5ctool\u2581calls\u2581end\uff5c>"
_SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"
_FENCED = re.compile(
    rf"function{_SEPARATOR}(?P<name>[^\n]+)\n```json\n(?P<arguments>.*)```", re.DOTALL
)
_PLAIN = re.compile(rf"(?P<name>.+?){_SEPARATOR}(?P<arguments>.*)", re.DOTALL)


class DeepSeekV31Parser(SectionParser):
    """Parses sections of calls. Each call stands between a begin mark and an end mark."""

    mark = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
    special_tokens: Sequence[str] = (mark, _CLOSING, _BEGIN, _END, _SEPARATOR)
    _call = _PLAIN

    def notation(self, special_tokens: Collection[str]) -> Notation:
        return Notation(
            lambda name: f"{_BEGIN}{name}{_SEPARATOR}", _END, "",
            opening=self.mark, closing=_CLOSING,
        )  # fmt: skip

    def take(self, section: str, *, is_last: bool) -> tuple[list[ToolCall], str] | None:
        if _CLOSING not in section and not is_last:
            return None
        inside, _, rest = section.partition(_CLOSING)
        texts = [text.strip() for text in inside.replace(_END, "").split(_BEGIN)]
        if texts[0] or len(texts) == 1:
            raise ValueError("text without a call")
        return [self._parsed(text) for text in texts[1:]], rest

    def _parsed(self, text: str) -> ToolCall:
        call = self._call.fullmatch(text)
        if call is None:
            raise ValueError("not a call")
        arguments = call["arguments"].strip()
        value, end = decode_json(arguments)
        if end < len(arguments):
            raise ValueError("text after the arguments")
        return tool_call({"name": call["name"].strip(), "arguments": value})


class DeepSeekV3Parser(DeepSeekV31Parser):
    """The older format."""

    _call = _FENCED

    def notation(self, special_tokens: Collection[str]) -> Notation:
        return Notation(
            lambda name: f"{_BEGIN}function{_SEPARATOR}{name}\n```json\n", f"\n```{_END}", "\n",
            opening=self.mark, closing=_CLOSING,
        )  # fmt: skip
