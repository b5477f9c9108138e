"""OpenAI's `tool_choice`: whether a chat may, must or must not call functions, and which ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from container.schema.fields import Values
from container.schema.kinds import Kind, object_schema
from core.errors import RequestError
from core.text.tools.notation import Function

_FUNCTION = object_schema(
    {"type": {"const": "function"}, "function": object_schema({"name": {"type": "string"}})}
)
_ALLOWED = object_schema(
    {
        "type": {"const": "allowed_tools"},
        "allowed_tools": object_schema(
            {
                "mode": {"enum": ["auto", "required"]},
                "tools": {"type": "array", "items": _FUNCTION},
            }
        ),
    }
)
TOOL_CHOICE = Kind(
    "none, auto, required, a function or allowed_tools",
    lambda value: isinstance(value, str | dict),
    {"anyOf": [{"enum": ["none", "auto", "required"]}, _FUNCTION, _ALLOWED]},
)


FUNCTION_CALL = Kind(
    'none, auto or {"name": ...}',
    lambda value: value in ("none", "auto") or _called(value) is not None,
    {
        "anyOf": [
            {"enum": ["none", "auto"]},
            object_schema({"name": {"type": "string"}}),
        ]
    },
)


def with_functions_as_tools(values: Values) -> Values:
    """Turn OpenAI's former fields `functions` and `function_call` into `tools` and `tool_choice`.

    Raises RequestError if `functions` is combined with `tools` or `tool_choice`, or if
    `function_call` names a function but `functions` is missing.
    """
    given = dict(values.given)
    functions = cast(list[object] | None, given.pop("functions", None))
    call = given.pop("function_call", None)
    if functions is None:
        if _called(call) is not None:
            raise RequestError("function_call", "needs functions")
        return replace(values, given=given)
    for name in ("tools", "tool_choice"):
        if name in given:
            raise RequestError(name, "cannot be combined with functions; use tools alone")
    given["tools"] = [{"type": "function", "function": function} for function in functions]
    if call is not None:
        name = _called(call)
        named = {"type": "function", "function": {"name": name}}
        given["tool_choice"] = call if name is None else named
    return replace(values, given=given)


def _called(call: object) -> str | None:
    match call:
        case {"name": str(name)}:
            return name
        case _:
            return None


def with_allowed_tools(values: Values) -> Values:
    """Replace `allowed_tools` by its mode, and keep only the `tools` that it names.

    Raises RequestError if it is malformed or names a tool that the request does not have.
    """
    match values.given.get("tool_choice"):
        case {"type": "allowed_tools", "allowed_tools": {"mode": str(mode), "tools": list()}}:
            pass
        case {"type": "allowed_tools"}:
            raise RequestError(
                "tool_choice.allowed_tools", "expected an object with mode and tools"
            )
        case _:
            return values
    if mode not in ("auto", "required"):
        raise RequestError("tool_choice.allowed_tools.mode", "expected auto or required")
    choice = cast(Mapping[str, Any], values.given["tool_choice"])
    allowed = [_named(tool) for tool in choice["allowed_tools"]["tools"]]
    tools: list[Mapping[str, Any]] = values.get("tools", [])
    for name in allowed:
        if name is None:
            raise RequestError("tool_choice.allowed_tools.tools", "expected functions with a name")
        if name not in map(_named, tools):
            raise RequestError(
                "tool_choice.allowed_tools.tools", f"tools have no function '{name}'"
            )
    kept = [tool for tool in tools if _named(tool) in allowed]
    return replace(values, given={**values.given, "tool_choice": mode, "tools": kept})


def _named(tool: object) -> str | None:
    match tool:
        case {"function": {"name": str(name)}}:
            return name
        case _:
            return None


@dataclass(frozen=True, slots=True)
class ForcedCalls:
    """The tool calls that an answer must consist of."""

    functions: tuple[Function, ...]
    """The functions that may be called."""
    is_single: bool
    """Whether the answer must be exactly one call, rather than one or more."""


def read_tool_choice(values: Values) -> Literal["none", "auto"] | ForcedCalls:
    """Read `tool_choice`.

    Raises RequestError if it is invalid or forces a function that has no usable definition.
    """
    choice = values.given.get("tool_choice", "auto")
    tools: list[Mapping[str, Any]] = values.get("tools", [])
    match choice:
        case "none" | "auto":
            return cast(Literal["none", "auto"], choice)
        case "required" if not tools:
            raise RequestError("tool_choice", "needs tools")
        case "required":
            functions = tuple(_function(tool, index) for index, tool in enumerate(tools))
            return ForcedCalls(functions, is_single=not values.get("parallel_tool_calls", True))
        case {"type": "function", "function": {"name": str(name)}}:
            return ForcedCalls((_find_function(name, tools),), is_single=True)
        case _:
            raise RequestError(
                "tool_choice",
                'expected none, auto, required or {"type": "function", "function": {"name": ...}}',
            )


@dataclass(frozen=True, slots=True)
class Tools:
    visible: tuple[Mapping[str, object], ...]
    """The tools that the model sees."""
    forced_calls: ForcedCalls | None
    """The calls that the model must make; None if it is free to choose."""
    warnings: tuple[str, ...]


def read_tools(
    tools: list[Mapping[str, object]],
    choice: object,
    *,
    is_parallel: bool,
    parallel_field: str = "parallel_tool_calls",
) -> Tools:
    """Read the tools of another API, whose fields are already in the form of chat completions.

    `parallel_field` is the API's name for `is_parallel`. Raises as `read_tool_choice` does.
    """
    given = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": is_parallel}
    values = with_allowed_tools(Values(given, ()))
    read = read_tool_choice(values)
    forced_calls = read if isinstance(read, ForcedCalls) else None
    visible: list[Mapping[str, object]] = values.get("tools", [])
    return Tools(
        () if read == "none" else tuple(visible),
        forced_calls,
        parallel_warnings(forced_calls, is_parallel=is_parallel, field=parallel_field),
    )


def parallel_warnings(
    forced_calls: ForcedCalls | None, *, is_parallel: bool, field: str = "parallel_tool_calls"
) -> tuple[str, ...]:
    """Return a warning if `field` asks for one call at most, but calls are not forced.

    Nothing limits the number of calls that the model makes by itself.
    """
    if forced_calls is not None or is_parallel:
        return ()
    return (f"{field} has no effect with this tool_choice",)


def _find_function(name: str, tools: list[Mapping[str, Any]]) -> Function:
    for index, tool in enumerate(tools):
        match tool:
            case {"function": {"name": str(tool_name)}} if tool_name == name:
                return _function(tool, index)
            case _:
                pass
    raise RequestError("tool_choice.function.name", f"tools have no function '{name}'")


def _function(tool: Mapping[str, Any], index: int) -> Function:
    """Return the function of `tools[index]`. Raises RequestError if its definition is invalid."""
    match tool:
        case {"function": {"name": str(name)}}:
            schema: object = tool["function"].get("parameters") or {}
        case _:
            raise RequestError(f"tools[{index}].function", "expected an object with a name")
    if isinstance(schema, dict):
        properties = cast(dict[str, Any], schema)
        if properties.get("type", "object") == "object":
            return Function(name, {"type": "object", **properties})
    field = f"tools[{index}].function.parameters"
    raise RequestError(field, "expected a JSON Schema of an object")
