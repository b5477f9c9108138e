"""The fields of a chat completion, beside those of its conversation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from container.apis.chat.tool_choice import TOOL_CHOICE, ForcedCalls, read_tool_choice
from container.apis.generation.conversation import (
    TEMPLATE_FIELDS,
    Conversation,
    read_conversation,
)
from container.apis.generation.sampling import Decoding, Dialect
from container.apis.openai.schema import OPENAI_FIELDS, includes_usage, read_openai_decoding
from container.schema.fields import Field, Fields, Values, ignored, read_fields, unserved
from container.schema.kinds import ANYTHING, BOOLEAN, INTEGER
from core.errors import RequestError

_DIALECT = Dialect(prompt="messages", names={"logprobs": "top_logprobs"})

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
