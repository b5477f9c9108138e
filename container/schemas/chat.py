"""OpenAI's chat completions: `messages`, tools, and how the template is to render them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import msgspec

from container.schemas.fields import Field, Fields, Values, ignored, read_fields, unserved
from container.schemas.kinds import (
    ANYTHING,
    BOOLEAN,
    INTEGER,
    OBJECT,
    OBJECTS,
    Schema,
    is_list,
    shaped,
)
from container.schemas.openai import OPENAI_FIELDS, includes_usage, read_openai_decoding
from container.schemas.sampling import Decoding, Dialect
from container.schemas.tool_choice import TOOL_CHOICE, ForcedCalls, read_tool_choice
from core.errors import RequestError

_DIALECT = Dialect(prompt="messages", names={"logprobs": "top_logprobs"})

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

CHAT_FIELDS: Fields = {
    **OPENAI_FIELDS,
    **TEMPLATE_FIELDS,
    "max_tokens": Field(INTEGER, "Most tokens of the answer (default: what the context holds)."),
    "max_completion_tokens": Field(INTEGER, "The same as `max_tokens`.", first_name="max_tokens"),
    "logprobs": Field(BOOLEAN, "Give the log-probability of each token."),
    "top_logprobs": Field(INTEGER, "With logprobs: so many likely tokens for each place."),
    "tool_choice": Field(TOOL_CHOICE, "none, auto, required, or the function to be called."),
    "parallel_tool_calls": Field(
        BOOLEAN, "Where a call is required: whether several may follow each other (default true)."
    ),
    "functions": unserved(ANYTHING, [], instead="use tools"),
    "function_call": unserved(ANYTHING, "none", instead="use tool_choice"),
    "modalities": unserved(ANYTHING, ["text"]),
    "audio": unserved(ANYTHING),
    "web_search_options": unserved(ANYTHING),
    "prediction": ignored(),
    "reasoning_effort": ignored("chat_template_kwargs reach the template."),
    "verbosity": ignored(),
}


@dataclass(frozen=True, slots=True)
class Conversation:
    """What the chat template renders."""

    messages: tuple[Mapping[str, object], ...]
    tools: tuple[Mapping[str, object], ...]
    add_generation_prompt: bool
    continue_final_message: bool
    variables: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A checked request."""

    conversation: Conversation
    decoding: Decoding
    model: object
    forced_calls: ForcedCalls | None
    """The calls of which the answer must consist."""
    stream: bool
    include_usage: bool
    logprobs: bool
    warnings: tuple[str, ...]

    @property
    def n(self) -> int:
        """Choices of the answer."""
        return self.decoding.params.n


def read_chat_request(body: Mapping[str, object]) -> ChatRequest:
    """Raises RequestError that names the first mistake."""
    values = read_fields(body, CHAT_FIELDS)
    decoding = read_openai_decoding(
        values,
        _DIALECT,
        max_tokens=values.get("max_tokens", None),
        logprobs=values.get("top_logprobs", 0) or None,
    )
    logprobs = values.get("logprobs", False)
    if decoding.params.logprobs and not logprobs:
        raise RequestError("top_logprobs", "needs logprobs=true")
    choice = read_tool_choice(values)
    forced = choice if isinstance(choice, ForcedCalls) else None
    if forced is not None and decoding.params.structured_outputs is not None:
        raise RequestError("tool_choice", "a forced call has the form of a call, and no other")
    return ChatRequest(
        conversation=read_conversation(values, uses_tools=choice != "none"),
        decoding=decoding,
        model=values.get("model", None),
        forced_calls=forced,
        stream=values.get("stream", False),
        include_usage=includes_usage(values),
        logprobs=logprobs,
        warnings=(*values.warnings, *decoding.warnings, *_passed_over(values, forced)),
    )


def _passed_over(values: Values, forced: ForcedCalls | None) -> tuple[str, ...]:
    """A model that is free to call may do so more than once."""
    is_without_effect = forced is None and not values.get("parallel_tool_calls", True)
    return ("parallel_tool_calls has no effect with this tool_choice",) if is_without_effect else ()


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
