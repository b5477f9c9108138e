"""The request fields of OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from container.apis.chat.tool_choice import (
    FUNCTION_CALL,
    TOOL_CHOICE,
    ForcedCalls,
    parallel_warnings,
    read_tool_choice,
    with_allowed_tools,
    with_functions_as_tools,
)
from container.apis.chat.turn import Turn
from container.apis.generation.conversation import (
    TEMPLATE_FIELDS,
    Conversation,
    read_conversation,
)
from container.apis.generation.sampling import Dialect, bounded
from container.apis.named_model import read_model
from container.apis.openai import (
    OPENAI_FIELDS,
    ResponseOptions,
    StreamUsage,
    read_openai_decoding,
    read_response_options,
    read_stream_usage,
)
from container.schema.fields import Field, Fields, Values, ignored, read_fields, unsupported
from container.schema.kinds import ANYTHING, BOOLEAN, INTEGER, OBJECTS
from core.errors import RequestError

_DIALECT = Dialect(prompt="messages", names={"logprobs": "top_logprobs"}, operation="chat")

CHAT_FIELDS: Fields = {
    **OPENAI_FIELDS,
    **TEMPLATE_FIELDS,
    "max_tokens": Field(
        bounded(INTEGER, "max_tokens"),
        "Maximum number of generated tokens (default: the rest of the context).",
    ),
    "max_completion_tokens": Field(
        bounded(INTEGER, "max_tokens"), "The same as `max_tokens`.", canonical_name="max_tokens"
    ),
    "logprobs": Field(BOOLEAN, "Return the logprob of each token."),
    "top_logprobs": Field(
        bounded(INTEGER, "logprobs"),
        "With logprobs: return this many of the most likely tokens at each position (default 1).",
    ),
    "tool_choice": Field(TOOL_CHOICE, "none, auto, required, or the function to call."),
    "parallel_tool_calls": Field(
        BOOLEAN, "With tool_choice=required: allow several calls (default true)."
    ),
    "echo": Field(BOOLEAN, "If the last message is the assistant's, return it before the answer."),
    "include_reasoning": Field(
        BOOLEAN, "With a reasoning parser: return the reasoning too (default true)."
    ),
    "functions": Field(OBJECTS, "OpenAI's former field for `tools`: the functions themselves."),
    "function_call": Field(
        FUNCTION_CALL, "OpenAI's former field for `tool_choice`: none, auto or a function's name."
    ),
    "modalities": unsupported(ANYTHING, ["text"]),
    "audio": unsupported(ANYTHING),
    "web_search_options": unsupported(ANYTHING),
    "prediction": ignored(),
    "verbosity": ignored(),
}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    turn: Turn
    uses_functions: bool
    """Whether calls are returned as OpenAI's former `function_call`."""
    names_function: bool
    """Whether `tool_choice` names the function to call."""
    stream: bool
    stream_usage: StreamUsage
    response_options: ResponseOptions
    shows_reasoning: bool
    echo: str
    """The text to put before each answer: the last message's, if the assistant wrote it."""
    logprobs: bool
    warnings: tuple[str, ...]


def read_chat_request(body: Mapping[str, object]) -> ChatRequest:
    """Validate a request. Raises RequestError naming the first bad field."""
    values = read_fields(body, CHAT_FIELDS)
    uses_functions = "functions" in values
    values = with_allowed_tools(with_functions_as_tools(values))
    logprobs = values.get("logprobs", False)
    decoding = read_openai_decoding(
        values,
        _DIALECT,
        max_tokens=values.get("max_tokens", None),
        logprobs=values.get("top_logprobs", _default_top_logprobs(values)) or None,
    )
    if decoding.params.logprobs and not logprobs:
        raise RequestError("top_logprobs", "needs logprobs=true")
    stream_usage = read_stream_usage(values)
    choice = read_tool_choice(values)
    forced_calls = choice if isinstance(choice, ForcedCalls) else None
    conversation = read_conversation(values, uses_tools=choice != "none")
    return ChatRequest(
        turn=Turn(conversation, decoding, forced_calls, read_model(values)),
        uses_functions=uses_functions,
        names_function=isinstance(values.given.get("tool_choice"), dict),
        stream=values.get("stream", False),
        stream_usage=stream_usage,
        response_options=read_response_options(values),
        shows_reasoning=values.get("include_reasoning", True),
        echo=_last_text(conversation) if values.get("echo", False) else "",
        logprobs=logprobs,
        warnings=(
            *values.warnings,
            *stream_usage.warnings,
            *decoding.warnings,
            *parallel_warnings(forced_calls, is_parallel=values.get("parallel_tool_calls", True)),
        ),
    )


def _last_text(conversation: Conversation) -> str:
    """Return the text of the last message if it is the assistant's, else ''."""
    message = conversation.messages[-1]
    content = message.get("content", "") if message["role"] == "assistant" else ""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in cast(list[dict[str, str]], content))


def _default_top_logprobs(values: Values) -> int:
    """Return LMI's default, 1; 0 without `logprobs`, and for beam search, which has none."""
    is_beam_search = values.get("num_beams", 1) != 1 or values.get("use_beam_search", False)
    return 1 if values.get("logprobs", False) and not is_beam_search else 0
