"""The request fields and response parts that OpenAI's completions and chat completions share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from container.apis.generation.generation import Generation
from container.apis.generation.response import Record
from container.apis.generation.sampling import SAMPLING_FIELDS, Decoding, Dialect, read_decoding
from container.apis.generation.structured_outputs import RESPONSE_FORMAT
from container.schema.fields import Field, Fields, Values, ignored
from container.schema.kinds import ANYTHING, BOOLEAN, OBJECT, STRING_OR_STRINGS, with_schema
from core.errors import RequestError
from core.sampling import Finish

_FINISH_REASONS = {Finish.EOS: "stop", Finish.STOP: "stop", Finish.LENGTH: "length"}
_STREAM_OPTIONS = with_schema(OBJECT, {"properties": {"include_usage": {"type": "boolean"}}})

OPENAI_FIELDS: Fields = {
    **SAMPLING_FIELDS,
    "stop": Field(STRING_OR_STRINGS, "Stop strings: they end the answer and are not part of it."),
    "ignore_eos": Field(BOOLEAN, "Keep generating after the end-of-sequence token."),
    "stream": Field(BOOLEAN, "Stream the answer as server-sent events."),
    "stream_options": Field(_STREAM_OPTIONS, "include_usage: send token counts in a last chunk."),
    "response_format": RESPONSE_FORMAT,
    "model": Field(
        ANYTHING,
        "With option.enable_lora: the name of the model or of an adapter. Otherwise ignored, "
        "since only one model is served.",
    ),
    "user": ignored(),
    "metadata": ignored(),
    "store": ignored(),
    "service_tier": ignored(),
    "safety_identifier": ignored(),
    "prompt_cache_key": ignored(),
    "prompt_cache_retention": ignored(),
    "aws_region_name": ignored("litellm's own parameter, which its SageMaker client sends along."),
}


def read_openai_decoding(
    values: Values, dialect: Dialect, *, max_tokens: int | None, **own: object
) -> Decoding:
    """Check the sampling parameters as `read_decoding` does; the default temperature is 1."""
    stop: str | list[str] = values.get("stop", [])
    if "prompt_logprobs" in values and values.get("stream", False):
        raise RequestError("prompt_logprobs", "cannot be combined with stream")
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
    """Return whether a stream ends with token counts. Raises RequestError for a non-boolean."""
    options: Mapping[str, object] = values.get("stream_options", {})
    include = options.get("include_usage", False)
    if not isinstance(include, bool):
        raise RequestError("stream_options.include_usage", "expected true or false")
    return include


@dataclass(frozen=True, slots=True)
class Envelope:
    """The fields that identify a response and that all its records carry."""

    id: str
    created: int
    """Seconds since 1970."""
    model: str

    def record(self, object: str, choices: Sequence[Record], **more: object) -> Record:
        """Return a record of the type `object` with these choices and further fields."""
        return {
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
        }


def finish_reason(finish: Finish | None) -> str | None:
    """Return OpenAI's name for a finish reason; None for an answer that is still running."""
    return None if finish is None else _FINISH_REASONS.get(finish, finish.value)


def usage(generations: Iterable[Generation]) -> Record:
    """Count the tokens so far: each prompt once, and every sampled answer."""
    num_prompt = num_completion = 0
    for generation in generations:
        num_prompt += len(generation.prompt_token_ids)
        num_completion += generation.num_generated_tokens
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
    }
