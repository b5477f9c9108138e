"""The request fields of Anthropic's messages API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from container.apis.anthropic.content import read_messages
from container.apis.chat.tool_choice import ForcedCalls, Tools, read_tools
from container.apis.chat.turn import Turn
from container.apis.generation.conversation import (
    EFFORT,
    TEMPLATE_FIELDS,
    TEXT_PART,
    Conversation,
    template_variables,
)
from container.apis.generation.media import ANTHROPIC_MEDIA
from container.apis.generation.sampling import (
    ONE_ANSWER_FIELDS,
    Decoding,
    Dialect,
    bounded,
    read_decoding,
)
from container.apis.named_model import MODEL_FIELDS, read_model
from container.apis.openai import OPENAI_FIELDS, read_request_id
from container.schema.fields import Field, Fields, Values, ignored, read_fields, unsupported
from container.schema.kinds import (
    ANYTHING,
    BOOLEAN,
    INTEGER,
    OBJECT,
    OBJECTS,
    STRINGS,
    Kind,
    content_schema,
    object_schema,
    with_schema,
)
from core.configuration.limits import MESSAGES, TOOLS
from core.errors import RequestError

_DIALECT = Dialect(prompt="messages", names={"stop": "stop_sequences"}, operation="chat")
_CHOICES: Mapping[object, str] = {"auto": "auto", "any": "required", "none": "none"}
"""Anthropic's tool choices, with the names that chat completions have for them."""
_NAMED_TOOL = object_schema(
    {
        "name": {"type": "string"},
        "type": {"const": "custom"},
        "input_schema": {"type": "object", "properties": {"type": {"const": "object"}}},
    },
    ["name"],
)
_CONTENT = content_schema(TEXT_PART, ANTHROPIC_MEDIA.schema)
_MESSAGE = object_schema({"role": {"enum": ["user", "assistant"]}, "content": _CONTENT})
_SYSTEM = Kind(
    "a string or a list of text blocks",
    lambda value: isinstance(value, str | list),
    {"type": "string"},
)
_THINKING_KINDS = ("enabled", "adaptive", "disabled")
_THINKING: Fields = {
    "type": Field(ANYTHING, "enabled, adaptive or disabled."),
    "budget_tokens": ignored(),
    "display": ignored(),
}
_OUTPUT: Fields = {
    "effort": Field(EFFORT, "How much the model reasons."),
    "format": Field(OBJECT, "json_schema: the format of the answer."),
}

COUNT_FIELDS: Fields = {
    "model": OPENAI_FIELDS["model"],
    "messages": Field(
        with_schema(OBJECTS, {"minItems": 1, "items": _MESSAGE}),
        f"The conversation, with the oldest message first. {ANTHROPIC_MEDIA.help} If the last "
        "message is the assistant's, the answer continues it.",
        limit=MESSAGES,
    ),
    "system": Field(_SYSTEM, "The system message."),
    "tools": Field(
        with_schema(OBJECTS, {"items": _NAMED_TOOL}),
        "Functions that the model may call.",
        limit=TOOLS,
    ),
    "tool_choice": Field(
        with_schema(OBJECT, {"properties": {"type": {"enum": ["auto", "none"]}}}),
        "auto, any, none, or the tool to call.",
    ),
    "thinking": Field(
        with_schema(OBJECT, {"properties": {"type": {"enum": list(_THINKING_KINDS)}}}),
        "Whether the model reasons: enabled, adaptive or disabled. This has an effect only if the "
        "chat template has such a setting.",
    ),
    "output_config": Field(
        with_schema(OBJECT, {"properties": {"effort": EFFORT.schema, "format": {"type": "null"}}}),
        "effort: how much the model reasons. format: a JSON Schema for the answer.",
    ),
    "chat_template_kwargs": TEMPLATE_FIELDS["chat_template_kwargs"],
    "cache_control": ignored("Prompts with equal prefixes share cached blocks without it."),
    "metadata": ignored(),
    "service_tier": ignored(),
    "inference_geo": ignored(),
    "speed": ignored(),
    "diagnostics": ignored(),
    "container": unsupported(ANYTHING),
    "context_management": unsupported(ANYTHING),
    "mcp_servers": unsupported(ANYTHING, []),
}
_SHARED = (
    *MODEL_FIELDS, "truncate_prompt_tokens", "request_id", "ignore_eos", "logits_processors",
    "vllm_xargs", "kv_transfer_params",
)  # fmt: skip
"""The fields of chat completions that the messages API has, too."""

MESSAGES_FIELDS: Fields = {
    **ONE_ANSWER_FIELDS,
    **COUNT_FIELDS,
    **{name: OPENAI_FIELDS[name] for name in _SHARED},
    "max_tokens": Field(
        bounded(INTEGER, "max_tokens"),
        "Maximum number of generated tokens (default: the rest of the context).",
    ),
    "stop_sequences": Field(
        STRINGS, "Stop strings. A stop string ends the answer and is not part of it."
    ),
    "stream": Field(BOOLEAN, "Stream the message as named server-sent events."),
}


@dataclass(frozen=True, slots=True)
class MessagesRequest:
    turn: Turn
    stream: bool
    request_id: str | None
    warnings: tuple[str, ...]


def read_messages_request(body: Mapping[str, object]) -> MessagesRequest:
    """Validate a request. Raises RequestError naming the first bad field."""
    values = read_fields(body, MESSAGES_FIELDS)
    conversation, forced_calls, warnings = _conversation(values)
    decoding = _decoding(values)
    return MessagesRequest(
        turn=Turn(conversation, decoding, forced_calls, read_model(values)),
        stream=values.get("stream", False),
        request_id=read_request_id(values),
        warnings=(*values.warnings, *warnings, *decoding.warnings),
    )


@dataclass(frozen=True, slots=True)
class CountRequest:
    conversation: Conversation
    warnings: tuple[str, ...]


def read_count_request(body: Mapping[str, object]) -> CountRequest:
    """Validate a request to count tokens. Raises RequestError naming the first bad field."""
    values = read_fields(body, COUNT_FIELDS)
    conversation, _, warnings = _conversation(values)
    return CountRequest(conversation, (*values.warnings, *warnings))


def _conversation(values: Values) -> tuple[Conversation, ForcedCalls | None, tuple[str, ...]]:
    """Return the conversation, the calls that are forced, and warnings."""
    given: list[Mapping[str, Any]] = values.get("messages", [])
    if not given:
        raise RequestError("messages", "expected at least one message")
    thinking = read_fields(values.get("thinking", {}), _THINKING, "thinking.")
    output = read_fields(values.get("output_config", {}), _OUTPUT, "output_config.")
    tools = _tools(values)
    continues = given[-1].get("role") == "assistant"
    messages, media = read_messages(given, values.get("system", ""))
    conversation = Conversation(
        messages=messages,
        media=media,
        tools=tools.visible,
        add_generation_prompt=not continues,
        continue_final_message=continues,
        add_special_tokens=False,
        variables=template_variables(
            values, output.get("effort", None), is_reasoning=_is_reasoning(thinking)
        ),
    )
    warnings = (*thinking.warnings, *output.warnings, *tools.warnings)
    return conversation, tools.forced_calls, warnings


def _is_reasoning(thinking: Values) -> bool | None:
    """Return whether the model is to reason; None if the request does not say."""
    kind: object = thinking.get("type", None)
    if kind is None:
        return None
    if kind not in _THINKING_KINDS:
        raise RequestError("thinking.type", f"expected one of {', '.join(_THINKING_KINDS)}")
    return kind != "disabled"


def _tools(values: Values) -> Tools:
    tools: list[Mapping[str, Any]] = values.get("tools", [])
    choice: Mapping[str, Any] = values.get("tool_choice", {"type": "auto"})
    return read_tools(
        [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)],
        _choice(choice),
        is_parallel=choice.get("disable_parallel_tool_use") is not True,
        parallel_field="tool_choice.disable_parallel_tool_use",
    )


def _tool(tool: Mapping[str, Any], field: str) -> Mapping[str, object]:
    if tool.get("type", "custom") != "custom":
        kind = tool["type"]
        raise RequestError(f"{field}.type", f"{kind!s:.50} is not supported; only custom is")
    if not isinstance(tool.get("name"), str):
        raise RequestError(f"{field}.name", "expected a string")
    if not isinstance(tool.get("input_schema"), dict | None):
        raise RequestError(f"{field}.input_schema", "expected a JSON Schema of an object")
    given = {
        "name": tool["name"],
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }
    function = {name: value for name, value in given.items() if value is not None}
    return {"type": "function", "function": function}


def _choice(choice: Mapping[str, Any]) -> object:
    """Return a tool choice in the form of chat completions."""
    match choice:
        case {"type": "tool", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "auto" | "any" | "none" as kind}:
            return _CHOICES[kind]
        case _:
            raise RequestError(
                "tool_choice",
                'expected the type auto, any or none, or {"type": "tool", "name":...}',
            )


def _decoding(values: Values) -> Decoding:
    decoding = read_decoding(
        values,
        _DIALECT,
        max_tokens=values.get("max_tokens", None),
        stop=tuple(values.get("stop_sequences", cast(list[str], []))),
        temperature=values.get("temperature", 1.0),
        ignore_eos=values.get("ignore_eos", False),
        truncate_prompt_tokens=values.get("truncate_prompt_tokens", None),
    )
    output: Mapping[str, Any] = values.get("output_config", {})
    format = output.get("format")
    return decoding if format is None else decoding.with_format(format, "output_config.format")
