"""What OpenAI's completions and chat completions have in common."""

from __future__ import annotations

from collections.abc import Mapping

from container.apis.generation.forms import RESPONSE_FORMAT
from container.apis.generation.sampling import SAMPLING_FIELDS, Decoding, Dialect, read_decoding
from container.schema.fields import Field, Fields, Values, ignored
from container.schema.kinds import ANYTHING, BOOLEAN, OBJECT, TEXT_OR_TEXTS, shaped
from core.errors import RequestError

_STREAM_OPTIONS = shaped(OBJECT, {"properties": {"include_usage": {"type": "boolean"}}})

OPENAI_FIELDS: Fields = {
    **SAMPLING_FIELDS,
    "stop": Field(TEXT_OR_TEXTS, "Texts that end the answer and are not part of it."),
    "ignore_eos": Field(BOOLEAN, "Go on after the model's own end."),
    "stream": Field(BOOLEAN, "Send the answer in pieces, as server-sent events."),
    "stream_options": Field(_STREAM_OPTIONS, "include_usage: count the tokens in a last piece."),
    "response_format": RESPONSE_FORMAT,
    "model": Field(
        ANYTHING,
        "With option.enable_lora the model's name or an adapter's; else passed over: one model is "
        "served, whatever its name here.",
    ),
    "user": ignored(),
    "metadata": ignored(),
    "store": ignored(),
    "service_tier": ignored(),
    "safety_identifier": ignored(),
    "prompt_cache_key": ignored(),
    "prompt_cache_retention": ignored(),
}


def read_openai_decoding(
    values: Values, dialect: Dialect, *, max_tokens: int | None, **own: object
) -> Decoding:
    """Sampled with temperature 1 unless another is given."""
    stop: str | list[str] = values.get("stop", [])
    if "prompt_logprobs" in values and values.get("stream", False):
        raise RequestError("prompt_logprobs", "does not go with stream")
    return read_decoding(
        values,
        dialect,
        max_tokens=max_tokens,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        temperature=values.get("temperature", 1.0),
        ignore_eos=values.get("ignore_eos", False),
        **own,
    )


def includes_usage(values: Values) -> bool:
    """Whether a stream ends with a count of its tokens."""
    options: Mapping[str, object] = values.get("stream_options", {})
    include = options.get("include_usage", False)
    if not isinstance(include, bool):
        raise RequestError("stream_options.include_usage", "expected true or false")
    return include
