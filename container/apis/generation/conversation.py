"""A conversation, and the fields that say how the chat template renders it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import msgspec

from container.schema.fields import Field, Fields, Values, unserved
from container.schema.kinds import ANYTHING, BOOLEAN, OBJECT, OBJECTS, Schema, is_list, shaped
from core.errors import RequestError

_CONTENT: Schema = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                "required": ["type", "text"],
            },
        },
    ]
}
_MESSAGE: Schema = {
    "type": "object",
    "properties": {"role": {"type": "string"}, "content": _CONTENT},
    "required": ["role", "content"],
}
_MESSAGES = shaped(OBJECTS, {"minItems": 1, "items": _MESSAGE})

TEMPLATE_FIELDS: Fields = {
    "messages": Field(_MESSAGES, "The conversation, the oldest message first."),
    "tools": Field(OBJECTS, "Functions that the model may ask to be called."),
    "add_generation_prompt": Field(BOOLEAN, "End where an answer begins (default true)."),
    "continue_final_message": Field(BOOLEAN, "Go on with the last message, not after it."),
    "chat_template_kwargs": Field(OBJECT, "More variables for the chat template."),
    "chat_template": unserved(ANYTHING, instead="use option.chat_template"),
    "add_special_tokens": unserved(
        BOOLEAN, False, instead="the chat template writes all special tokens"
    ),
}


@dataclass(frozen=True, slots=True)
class Conversation:
    """What the chat template renders."""

    messages: tuple[Mapping[str, object], ...]
    tools: tuple[Mapping[str, object], ...]
    add_generation_prompt: bool
    continue_final_message: bool
    variables: Mapping[str, object]


def read_conversation(values: Values, *, uses_tools: bool = True) -> Conversation:
    """The fields of TEMPLATE_FIELDS; `arguments` of tool calls become objects."""
    messages: list[dict[str, object]] = values.get("messages", [])
    if not messages:
        raise RequestError("messages", "expected at least one message")
    tools: list[Mapping[str, object]] = values.get("tools", [])
    continues: bool = values.get("continue_final_message", False)
    if continues and values.get("add_generation_prompt", False):
        raise RequestError(
            "continue_final_message", "does not go with add_generation_prompt; set one of them"
        )
    return Conversation(
        messages=tuple(_message(each, f"messages[{at}]") for at, each in enumerate(messages)),
        tools=tuple(tools) if uses_tools else (),
        add_generation_prompt=values.get("add_generation_prompt", not continues),
        continue_final_message=continues,
        variables=values.get("chat_template_kwargs", {}),
    )


def _message(message: Mapping[str, object], field: str) -> Mapping[str, object]:
    """Without what is null, which templates tell badly from what is there."""
    given = {name: value for name, value in message.items() if value is not None}
    if not isinstance(given.get("role"), str):
        raise RequestError(f"{field}.role", "expected a text such as user")
    if "content" in given:
        given["content"] = _content(given["content"], f"{field}.content")
    elif "tool_calls" not in given:
        raise RequestError(f"{field}.content", "expected a text, or a list of text parts")
    if "tool_calls" in given:
        given["tool_calls"] = _tool_calls(given["tool_calls"], f"{field}.tool_calls")
    return given


def _content(content: object, field: str) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    if not is_list(content):
        raise RequestError(field, "expected a text, or a list of text parts")
    return [
        {"type": "text", "text": _part(each, f"{field}[{at}]")} for at, each in enumerate(content)
    ]


def _part(part: object, field: str) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": "text"}:
            raise RequestError(f"{field}.text", "expected a text")
        case {"type": str(kind)}:
            raise RequestError(f"{field}.type", f"{kind} is not served; only text parts are")
        case _:
            raise RequestError(field, 'expected a part such as {"type": "text", "text": "..."}')


def _tool_calls(calls: object, field: str) -> list[object]:
    if not is_list(calls):
        raise RequestError(field, "expected a list of tool calls")
    return [_tool_call(each, f"{field}[{at}]") for at, each in enumerate(calls)]


def _tool_call(call: object, field: str) -> object:
    """Templates want arguments as an object; OpenAI's clients send it as JSON in a text."""
    match call:
        case {"function": {"name": str(name), "arguments": str(arguments)}}:
            function = {"name": name, "arguments": _arguments(arguments, field)}
            return {**cast(Mapping[str, object], call), "function": function}
        case {"function": {"name": str(), "arguments": dict()}}:
            return call
        case _:
            raise RequestError(f"{field}.function", "expected an object with name and arguments")


def _arguments(text: str, field: str) -> object:
    try:
        arguments: object = msgspec.json.decode(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise RequestError(f"{field}.function.arguments", "expected a JSON object as a text")
    return cast(dict[str, object], arguments)
