"""The request fields of OpenAI's responses API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from container.apis.chat.tool_choice import Tools, read_tools
from container.apis.chat.turn import Turn
from container.apis.generation.conversation import (
    EFFORT,
    TEMPLATE_FIELDS,
    Conversation,
    template_variables,
)
from container.apis.generation.media import RESPONSES_MEDIA
from container.apis.generation.reply import Record
from container.apis.generation.sampling import (
    ONE_ANSWER_FIELDS,
    Decoding,
    Dialect,
    bounded,
)
from container.apis.named_model import MODEL_FIELDS, read_model
from container.apis.openai import OPENAI_FIELDS, read_openai_decoding, read_request_id
from container.apis.responses.input import INPUT, read_input
from container.schema.fields import Field, Fields, Values, ignored, read_fields, unsupported
from container.schema.kinds import (
    ANYTHING,
    BOOLEAN,
    INTEGER,
    OBJECT,
    OBJECTS,
    STRING,
    STRINGS,
    Kind,
    object_schema,
    with_schema,
)
from core.configuration.limits import MESSAGES, TOOLS
from core.errors import RequestError

_DIALECT = Dialect(
    prompt="input",
    names={"max_tokens": "max_output_tokens", "logprobs": "top_logprobs"},
    operation="chat",
)
_NOT_STORED = "send the whole conversation as input, since nothing is stored"
_LOGPROBS = "message.output_text.logprobs"
_TOOL_CHOICE = Kind(
    "none, auto, required, a function or allowed_tools",
    lambda value: isinstance(value, str | dict),
    {
        "anyOf": [
            {"enum": ["none", "auto"]},
            object_schema({"type": {"const": "function"}, "name": {"type": "string"}}),
        ]
    },
)
_TOOLS = with_schema(
    OBJECTS,
    {
        "items": object_schema(
            {
                "type": {"const": "function"},
                "name": {"type": "string"},
                "parameters": {"type": "object"},
            },
            ["type", "name"],
        )
    },
)
_TEXT: Fields = {
    "format": Field(OBJECT, "text, json_object or json_schema: the format of the answer."),
    "verbosity": ignored(),
}
_REASONING: Fields = {
    "effort": Field(EFFORT, "How much the model reasons."),
    **dict.fromkeys(("summary", "generate_summary", "context", "mode"), ignored()),
}
_SHARED = (
    "stop", "ignore_eos", *MODEL_FIELDS, "truncate_prompt_tokens", "request_id",
    "logits_processors", "vllm_xargs", "kv_transfer_params", "user", "service_tier",
    "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "aws_region_name",
)  # fmt: skip
"""The fields of chat completions that the responses API has, too."""

RESPONSES_FIELDS: Fields = {
    **ONE_ANSWER_FIELDS,
    **{name: OPENAI_FIELDS[name] for name in _SHARED},
    "chat_template_kwargs": TEMPLATE_FIELDS["chat_template_kwargs"],
    "input": Field(
        INPUT,
        f"The prompt, or the items of the conversation. {RESPONSES_MEDIA.help}",
        limit=MESSAGES,
    ),
    "instructions": Field(STRING, "The system message."),
    "max_output_tokens": Field(
        bounded(INTEGER, "max_tokens"),
        "Maximum number of generated tokens (default: the rest of the context).",
    ),
    "stream": Field(BOOLEAN, "Stream the response as named server-sent events."),
    "stream_options": ignored(),
    "tools": Field(_TOOLS, "Functions that the model may call.", limit=TOOLS),
    "tool_choice": Field(_TOOL_CHOICE, "none, auto, required, or the function to call."),
    "parallel_tool_calls": Field(
        BOOLEAN, "With tool_choice=required: allow several calls (default true)."
    ),
    "text": Field(
        with_schema(OBJECT, {"properties": {"format": {"enum": [{"type": "text"}]}}}),
        "`format`: text, json_object or json_schema.",
    ),
    "reasoning": Field(
        with_schema(OBJECT, {"properties": {"effort": EFFORT.schema}}),
        "`effort`: how much the model reasons.",
    ),
    "include": Field(
        with_schema(STRINGS, {"items": {"enum": [_LOGPROBS, "reasoning.encrypted_content"]}}),
        f"`{_LOGPROBS}`: return the logprob of each token of the text. Other "
        "values have no effect here.",
    ),
    "top_logprobs": Field(
        bounded(INTEGER, "logprobs"),
        f"With `{_LOGPROBS}` in `include`: return this many of the most likely tokens at each "
        "position.",
    ),
    "metadata": Field(OBJECT, "An object that is returned with the response."),
    "truncation": unsupported(STRING, "disabled", instead="use truncate_prompt_tokens"),
    "store": Field(BOOLEAN, "Accepted, but nothing is stored: the response says false."),
    "background": unsupported(BOOLEAN, False),
    "previous_response_id": unsupported(STRING, instead=_NOT_STORED),
    "conversation": unsupported(ANYTHING, instead=_NOT_STORED),
    "prompt": unsupported(OBJECT, instead=_NOT_STORED),
    "max_tool_calls": ignored("There are no built-in tools."),
    "prompt_cache_options": ignored(),
    "context_management": ignored(),
    "moderation": unsupported(ANYTHING),
}


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    turn: Turn
    stream: bool
    logprobs: bool
    request_id: str | None
    echo: Record
    """The fields of the request that the response repeats."""
    warnings: tuple[str, ...]


def read_responses_request(body: Mapping[str, object]) -> ResponsesRequest:
    """Validate a request. Raises RequestError naming the first bad field."""
    values = read_fields(body, RESPONSES_FIELDS)
    if "input" not in values:
        raise RequestError("input", "expected a string or a list of items")
    reasoning = read_fields(values.get("reasoning", {}), _REASONING, "reasoning.")
    text = read_fields(values.get("text", {}), _TEXT, "text.")
    tools = _tools(values)
    decoding = _decoding(values, text)
    effort: str | None = reasoning.get("effort", None)
    messages, media = read_input(
        values.get("input", cast(str | list[dict[str, Any]], "")),
        values.get("instructions", None),
    )
    conversation = Conversation(
        messages=messages,
        media=media,
        tools=tools.visible,
        add_generation_prompt=True,
        continue_final_message=False,
        add_special_tokens=False,
        variables=template_variables(values, effort),
    )
    return ResponsesRequest(
        turn=Turn(conversation, decoding, tools.forced_calls, read_model(values)),
        stream=values.get("stream", False),
        logprobs=_includes_logprobs(values),
        request_id=read_request_id(values),
        echo=_echo(values, decoding, effort),
        warnings=(
            *values.warnings,
            *reasoning.warnings,
            *text.warnings,
            *tools.warnings,
            *decoding.warnings,
            *_ignored_fields(values),
        ),
    )


def _decoding(values: Values, text: Values) -> Decoding:
    max_tokens: int | None = values.get("max_output_tokens", None)
    # The number is read even if `include` does not ask for logprobs, so that a bad one is refused.
    logprobs = values.get("top_logprobs", 0) or None
    decoding = read_openai_decoding(values, _DIALECT, max_tokens=max_tokens, logprobs=logprobs)
    format: Mapping[str, Any] = text.get("format", {"type": "text"})
    return decoding.with_format(format, "text.format", ("text", "json_object"))


def _tools(values: Values) -> Tools:
    given: list[dict[str, Any]] = values.get("tools", [])
    return read_tools(
        [_tool(tool, f"tools[{index}]") for index, tool in enumerate(given)],
        _choice(values.get("tool_choice", "auto")),
        is_parallel=values.get("parallel_tool_calls", True),
    )


def _tool(tool: Mapping[str, Any], field: str) -> Mapping[str, object]:
    match tool:
        case {"type": "function", "name": str()}:
            pass
        case {"type": "function"}:
            raise RequestError(f"{field}.name", "expected a string")
        case _:
            kind = tool.get("type")
            raise RequestError(f"{field}.type", f"{kind!s:.50} is not supported; only function is")
    if not isinstance(tool.get("parameters"), dict | None):
        raise RequestError(f"{field}.parameters", "expected a JSON Schema of an object")
    names = ("name", "description", "parameters")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _choice(choice: object) -> object:
    """Return a tool choice in the form of chat completions, where functions are nested."""
    match choice:
        case str():
            return choice
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "mode": str(mode), "tools": list()}:
            tools = cast(Mapping[str, list[object]], choice)["tools"]
            allowed = {"mode": mode, "tools": [_choice(tool) for tool in tools]}
            return {"type": "allowed_tools", "allowed_tools": allowed}
        case _:
            raise RequestError(
                "tool_choice",
                'expected none, auto, required or {"type": "function", "name": ...}',
            )


def _echo(values: Values, decoding: Decoding, effort: str | None) -> Record:
    return {
        "error": None,
        "incomplete_details": None,
        "background": False,
        "store": False,
        "previous_response_id": None,
        "instructions": values.get("instructions", None),
        "max_output_tokens": values.get("max_output_tokens", None),
        "metadata": values.get("metadata", {}),
        "parallel_tool_calls": values.get("parallel_tool_calls", True),
        "reasoning": {"effort": effort, "summary": None},
        "temperature": decoding.params.temperature,
        "text": values.get("text", {"format": {"type": "text"}}),
        "tool_choice": values.get("tool_choice", "auto"),
        "tools": values.get("tools", []),
        "top_logprobs": values.get("top_logprobs", 0),
        "top_p": decoding.params.top_p,
        "truncation": "disabled",
    }


def _ignored_fields(values: Values) -> tuple[str, ...]:
    warnings: list[str] = []
    if values.get("store", False):
        warnings.append("store has no effect here: nothing is stored")
    if any(name != _LOGPROBS for name in values.get("include", list[str]())):
        # The client's text is not repeated: a header cannot hold every character.
        warnings.append(f"include has no effect here, except {_LOGPROBS}")
    if values.get("top_logprobs", 0) and not _includes_logprobs(values):
        warnings.append(f"top_logprobs has no effect without {_LOGPROBS} in include")
    return tuple(warnings)


def _includes_logprobs(values: Values) -> bool:
    return _LOGPROBS in values.get("include", list[str]())
