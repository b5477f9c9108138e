"""Qwen 3 Coder: calls in XML, whose values are bare text.

```
<tool_call>
<function=f>
<parameter=city>
Paris
</parameter>
</function>
</tool_call>
```
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeGuard

from core.text.tools.base import SectionParser, ToolCall, decode_json, tool_call

_BEGIN, _END = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"\s*<function=(?P<name>[^>]+)>(?P<body>.*?)(?:</function>\s*|$)", re.DOTALL)
_PARAMETER = re.compile(
    r"\s*<parameter=(?P<name>[^>]+)>\n?(?P<value>.*?)\n?(?:</parameter>\s*|(?=<parameter=)|$)",
    re.DOTALL,
)


class Qwen3CoderParser(SectionParser):
    """Each section holds one call. The tools' schemas say which type a value has."""

    mark = _BEGIN
    special_tokens: Sequence[str] = (_BEGIN, _END)

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__()
        functions = [tool["function"] for tool in tools if _is_object(tool.get("function"))]
        self._properties = {
            function.get("name"): _properties(function.get("parameters")) for function in functions
        }

    def notation(self, special_tokens: Collection[str]) -> None:
        """Return None: forced arguments are JSON, which these XML calls cannot hold."""

    def take(self, section: str, *, is_last: bool) -> tuple[list[ToolCall], str] | None:
        if _END not in section and not is_last:
            return None
        inside, _, rest = section.partition(_END)
        call = _FUNCTION.fullmatch(inside)
        if call is None:
            raise ValueError("not a call")
        name, body = call["name"].strip(), call["body"].strip("\n ")
        schemas, arguments = self._properties.get(name, {}), dict[str, object]()
        at = 0
        while at < len(body):
            parameter = _PARAMETER.match(body, at)
            if parameter is None:
                raise ValueError("not a parameter")
            key, at = parameter["name"].strip(), parameter.end()
            arguments[key] = _value(parameter["value"], schemas.get(key))
        return [tool_call({"name": name, "arguments": arguments})], rest


def _properties(schema: object) -> Mapping[str, object]:
    properties = schema.get("properties") if _is_object(schema) else None
    return properties if _is_object(properties) else {}


def _value(text: str, schema: object) -> object:
    """Convert a value to its type; it stays text if it does not have that type."""
    kind = schema.get("type") if _is_object(schema) else None
    if kind == "string":
        return text
    try:
        value, end = decode_json(text.strip())
    except ValueError:
        return _BOOLEANS.get(text.strip(), text)
    return value if end == len(text.strip()) else text


def _is_object(value: object) -> TypeGuard[dict[str, object]]:
    return isinstance(value, dict)


_BOOLEANS: Mapping[str, object] = {"True": True, "False": False, "None": None}
"""A model trained on Python code may write these values as Python does."""
