"""Gives the arguments of calls the types of the tool's JSON Schema.

Formats such as XML write every argument as text. `"7"` becomes 7 for an integer, and stays text for
a string.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from core.text.tools.base import ToolCall, decode_json, tool_call

Properties = Mapping[str, Mapping[str, object]]
"""By the name of a function, the schemas of its arguments."""


def properties_of(tools: Sequence[Mapping[str, Any]]) -> Properties:
    """Return the schemas of the arguments of all tools that a request names."""
    found: dict[str, Mapping[str, object]] = {}
    for tool in tools:
        function = _mapping(tool.get("function", tool))
        schemas = _mapping(_mapping(function.get("parameters")).get("properties"))
        found[str(function.get("name"))] = schemas
    return found


def calls_of(value: object, properties: Properties) -> list[ToolCall]:
    """Return the calls of a field's value: one, or a list. Raises ValueError if it is neither."""
    if isinstance(value, list):
        return [call for item in cast(list[object], value) for call in calls_of(item, properties)]
    whole = _mapping(value)
    call = _mapping(whole.get("function", whole))
    name, arguments = str(call.get("name") or "").strip(), call.get("arguments")
    if isinstance(arguments, str):
        arguments = decode_json(arguments)[0]
    if not name or not isinstance(arguments, dict):
        raise ValueError("not a call")
    schemas = properties.get(name, {})
    typed = {
        key: _typed(item, _types(schemas.get(key)))
        for key, item in cast(dict[str, object], arguments).items()
    }
    found, id = tool_call({"name": name, "arguments": typed}), whole.get("id")
    return [replace(found, id=id) if isinstance(id, str) else found]


def _typed(value: object, types: tuple[str, ...]) -> object:
    """Return a text as the first of these types that it can be, or unchanged."""
    if isinstance(value, list):
        items = cast(list[object], value)  # of an argument that is repeated, unless it is a list
        return items if "array" in types else [_typed(item, types) for item in items]
    if not isinstance(value, str):
        return value
    text = _LITERALS.get(value.strip(), value)
    for kind in types:
        try:
            decoded = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if kind == "boolean" and decoded in (0, 1):
            return bool(decoded)
        if _is_of(decoded, kind):
            return int(decoded) if kind == "integer" else decoded
    return value


_LITERALS = {"None": "null", "True": "true", "False": "false"}
"""A model trained on Python code may write these values as Python does."""


def _is_of(value: object, kind: str) -> bool:
    """Whether a decoded value is of a type of JSON Schema."""
    if kind in ("integer", "number"):
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return math.isfinite(value) and (kind == "number" or value == math.floor(value))
    return type(value) is _PYTHON_TYPES.get(kind)


_PYTHON_TYPES = {"null": type(None), "object": dict, "array": list}


def _types(schema: object) -> tuple[str, ...]:
    """Return the types that a schema allows, in its order."""
    given = _mapping(schema)
    declared = given.get("type")
    types = [declared] if isinstance(declared, str) else declared
    found = [kind for kind in cast(list[object], types or []) if isinstance(kind, str)]
    for union in ("anyOf", "oneOf"):
        choices = given.get(union)
        for choice in cast(list[object], choices) if isinstance(choices, list) else ():
            found += _types(choice)
    return (*found, "null") if given.get("nullable") else tuple(found)


def _mapping(value: object) -> Mapping[str, Any]:
    return cast(Mapping[str, Any], value) if isinstance(value, Mapping) else {}
