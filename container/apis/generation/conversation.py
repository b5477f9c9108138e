"""The messages of a chat and the other fields that the chat template uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from container.apis.generation.media import CHAT_MEDIA, Media, Part, text_part
from container.schema.fields import Field, Fields, Values, unsupported
from container.schema.json_body import decode_json
from container.schema.kinds import (
    ANYTHING,
    BOOLEAN,
    OBJECT,
    OBJECTS,
    Kind,
    Schema,
    check_integers,
    content_schema,
    is_list,
    object_schema,
    with_schema,
)
from core.configuration.limits import MESSAGES, TOOLS
from core.errors import RequestError

TEXT_PART = object_schema({"type": {"const": "text"}, "text": {"type": "string"}})
_CONTENT = content_schema(TEXT_PART, CHAT_MEDIA.schema)
_ARGUMENTS: Schema = {
    "anyOf": [{"type": "string", "contentMediaType": "application/json"}, {"type": "object"}]
}
_CALL = object_schema(
    {
        "type": {"const": "function"},
        "function": object_schema({"name": {"type": "string"}, "arguments": _ARGUMENTS}),
    }
)
_MESSAGE: Schema = {
    **object_schema({"role": {"type": "string"}}),
    "anyOf": [
        {"properties": {"content": _CONTENT}, "required": ["content"]},
        {
            "properties": {
                "content": {"type": "null"},
                "tool_calls": {"type": "array", "items": _CALL},
            },
            "required": ["tool_calls"],
        },
    ],
}
_FUNCTION_CALL_ID = "function0"
"""The id of each call in OpenAI's former format, which has no ids. Mistral's chat templates need an
id of nine letters and digits."""
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
EFFORT = Kind(
    f"one of {', '.join(_EFFORTS)}", lambda value: value in _EFFORTS, {"enum": list(_EFFORTS)}
)
_MESSAGES = with_schema(OBJECTS, {"minItems": 1, "items": _MESSAGE})

TEMPLATE_FIELDS: Fields = {
    "messages": Field(
        _MESSAGES,
        f"The conversation, with the oldest message first. {CHAT_MEDIA.help}",
        limit=MESSAGES,
    ),
    "tools": Field(OBJECTS, "Functions that the model may call.", limit=TOOLS),
    "add_generation_prompt": Field(
        BOOLEAN, "End the prompt with the beginning of the assistant's message (default true)."
    ),
    "continue_final_message": Field(BOOLEAN, "Continue the last message instead of answering it."),
    "reasoning_effort": Field(
        EFFORT,
        "How much the model reasons, if the chat template has such a setting. `none` also sets the "
        "template's `enable_thinking` to false.",
    ),
    "chat_template_kwargs": Field(
        OBJECT,
        "Further variables for the chat template. Those that it does not read have no effect.",
    ),
    "chat_template": unsupported(ANYTHING, instead="use option.chat_template"),
    "add_special_tokens": Field(
        BOOLEAN,
        "With messages: also add the tokens that the model expects at the start of a prompt "
        "(default false, since most chat templates write them).",
    ),
}


@dataclass(frozen=True, slots=True)
class Conversation:
    """The input of the chat template."""

    messages: tuple[Mapping[str, object], ...]
    tools: tuple[Mapping[str, object], ...]
    add_generation_prompt: bool
    continue_final_message: bool
    add_special_tokens: bool
    variables: Mapping[str, object]
    media: Media
    """What the messages have besides text."""


def read_conversation(values: Values, *, uses_tools: bool = True) -> Conversation:
    """Read the fields of TEMPLATE_FIELDS. Raises RequestError that names the first bad field.

    The `arguments` of tool calls, which are JSON strings, are decoded. Without `uses_tools` the
    conversation has no tools.
    """
    messages: list[dict[str, object]] = values.get("messages", [])
    if not messages:
        raise RequestError("messages", "expected at least one message")
    tools: list[Mapping[str, object]] = values.get("tools", [])
    continues: bool = values.get("continue_final_message", False)
    if continues and values.get("add_generation_prompt", False):
        raise RequestError(
            "continue_final_message",
            "cannot be combined with add_generation_prompt; set one of them",
        )
    media = Media("messages", CHAT_MEDIA)
    checked = tuple(
        _message(message, f"messages[{index}]", media) for index, message in enumerate(messages)
    )
    return Conversation(
        messages=checked,
        tools=tuple(tools) if uses_tools else (),
        add_generation_prompt=values.get("add_generation_prompt", not continues),
        continue_final_message=continues,
        add_special_tokens=values.get("add_special_tokens", False),
        variables=template_variables(values, values.get("reasoning_effort", None)),
        media=media,
    )


def template_variables(
    values: Values, effort: str | None, *, is_reasoning: bool | None = None
) -> Mapping[str, object]:
    """Return the chat template's variables. Those in `chat_template_kwargs` override the others.

    is_reasoning: whether the model is to reason. By default the effort decides, if it is given.
    Templates know this variable under several names. Raises RequestError for an integer of more
    than 64 bits.
    """
    variables: dict[str, object] = {} if effort is None else {"reasoning_effort": effort}
    if is_reasoning is None and effort is not None:
        is_reasoning = effort != "none"
    if is_reasoning is not None:
        variables |= {"enable_thinking": is_reasoning, "thinking": is_reasoning}
    further: dict[str, object] = values.get("chat_template_kwargs", {})
    check_integers(further, "chat_template_kwargs")
    return variables | further


def _message(message: Mapping[str, object], field: str, media: Media) -> Mapping[str, object]:
    """Check a message. Null fields are removed, because templates would treat them as present.

    The exception is the content of a message with tool calls, which becomes empty if it is null or
    absent.

    The reasoning of an earlier answer is stored under both of vLLM's names for it, because a
    template may use either.
    """
    given = {name: value for name, value in message.items() if value is not None}
    given = _in_current_format(given)
    for name, other in (("reasoning", "reasoning_content"), ("reasoning_content", "reasoning")):
        if name in given:
            given.setdefault(other, given[name])
    if not isinstance(given.get("role"), str):
        raise RequestError(f"{field}.role", "expected a string such as user")
    if "content" in given:
        allowed = media.only(given["role"] in ("user", "tool"))
        given["content"] = _content(given["content"], f"{field}.content", allowed)
    elif "tool_calls" in given:
        given["content"] = ""  # many templates add it to the prompt without checking for it
    else:
        raise RequestError(f"{field}.content", "expected a string or a list of parts")
    if "tool_calls" in given:
        given["tool_calls"] = _tool_calls(given["tool_calls"], f"{field}.tool_calls")
    return given


def _in_current_format(message: dict[str, object]) -> dict[str, object]:
    """Replace OpenAI's former `function_call` and role `function` by `tool_calls` and `tool`."""
    if message.get("role") == "function":
        return {**message, "role": "tool", "tool_call_id": _FUNCTION_CALL_ID}
    if "function_call" not in message or "tool_calls" in message:
        return message
    rest = {name: value for name, value in message.items() if name != "function_call"}
    call = {"id": _FUNCTION_CALL_ID, "type": "function", "function": message["function_call"]}
    return {**rest, "tool_calls": [call]}


def _content(content: object, field: str, media: Media) -> str | list[Part]:
    """Return a message's content for the template."""
    if isinstance(content, str):
        return content
    if not is_list(content):
        raise RequestError(field, "expected a string or a list of parts")
    return [_part(part, f"{field}[{index}]", media) for index, part in enumerate(content)]


def _part(part: object, field: str, media: Media) -> Part:
    """Return a content part for the template."""
    match part:
        case {"type": "text", "text": str(text)}:
            return text_part(text)
        case {"type": "text"}:
            raise RequestError(f"{field}.text", "expected a string")
        case {"type": str(kind)}:
            found = media.part(part, field)
            if found is None:
                kinds = f"only text and {CHAT_MEDIA.type} are"
                raise RequestError(f"{field}.type", f"{kind} is not supported; {kinds}")
            return found
        case _:
            raise RequestError(field, 'expected a part such as {"type": "text", "text": "..."}')


def _tool_calls(calls: object, field: str) -> list[object]:
    if not is_list(calls):
        raise RequestError(field, "expected a list of tool calls")
    return [_tool_call(call, f"{field}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: object, field: str) -> object:
    """Decode the arguments, a JSON string in OpenAI's format; chat templates expect an object."""
    match call:
        case {"function": {"name": str(name), "arguments": str(arguments)}}:
            function = {
                "name": name,
                "arguments": read_arguments(arguments, f"{field}.function.arguments"),
            }
            return {**cast(Mapping[str, object], call), "function": function}
        case {"function": {"name": str(), "arguments": dict()}}:
            return call
        case _:
            raise RequestError(f"{field}.function", "expected an object with name and arguments")


def read_arguments(text: str, field: str) -> object:
    """Decode a call's arguments. Raises RequestError, naming `field`, unless they are an object."""
    try:
        arguments = decode_json(text.encode() or b"{}", field)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise RequestError(field, "expected a JSON object as a string")
    return cast(dict[str, object], arguments)
