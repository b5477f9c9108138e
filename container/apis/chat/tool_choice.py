"""OpenAI's `tool_choice`: whether a chat may, must or must not call functions, and which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from container.schema.fields import Values
from container.schema.kinds import Kind
from core.errors import RequestError
from core.text.tools.notation import Function

TOOL_CHOICE = Kind(
    "none, auto, required or a function",
    lambda value: isinstance(value, str | dict),
    {
        "anyOf": [
            {"enum": ["none", "auto", "required"]},
            {
                "type": "object",
                "properties": {
                    "type": {"const": "function"},
                    "function": {
                        "type": "object",
                        "properties": {"name": {"type": "string"}},
                        "required": ["name"],
                    },
                },
                "required": ["type", "function"],
            },
        ]
    },
)


@dataclass(frozen=True, slots=True)
class ForcedCalls:
    """Calls that an answer must make."""

    functions: tuple[Function, ...]
    """Those that may be called."""
    is_one: bool
    """One call, and no more."""


def read_tool_choice(values: Values) -> Literal["none", "auto"] | ForcedCalls:
    """Raises RequestError for what is neither, and for functions that cannot be forced."""
    choice = values.given.get("tool_choice", "auto")
    tools: list[Mapping[str, Any]] = values.get("tools", [])
    match choice:
        case "none" | "auto":
            return cast(Literal["none", "auto"], choice)
        case "required" if not tools:
            raise RequestError("tool_choice", "needs tools")
        case "required":
            functions = tuple(_function(tool, at) for at, tool in enumerate(tools))
            return ForcedCalls(functions, is_one=not values.get("parallel_tool_calls", True))
        case {"type": "function", "function": {"name": str(name)}}:
            return ForcedCalls((_named(name, tools),), is_one=True)
        case _:
            raise RequestError(
                "tool_choice",
                'expected none, auto, required or {"type": "function", "function": {"name": ...}}',
            )


def _named(name: str, tools: list[Mapping[str, Any]]) -> Function:
    for at, tool in enumerate(tools):
        match tool:
            case {"function": {"name": str(own)}} if own == name:
                return _function(tool, at)
            case _:
                pass
    raise RequestError("tool_choice.function.name", f"tools have no function '{name}'")


def _function(tool: Mapping[str, Any], at: int) -> Function:
    match tool:
        case {"function": {"name": str(name)}}:
            schema: object = tool["function"].get("parameters") or {}
        case _:
            raise RequestError(f"tools[{at}].function", "expected an object with a name")
    if isinstance(schema, dict):
        own = cast(dict[str, Any], schema)
        if own.get("type", "object") == "object":
            return Function(name, {"type": "object", **own})
    field = f"tools[{at}].function.parameters"
    raise RequestError(field, "expected a JSON Schema of an object")
