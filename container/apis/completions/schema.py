"""OpenAI's completions: `prompt` as text or tokens, one or several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from container.apis.generation.sampling import Decoding, Dialect
from container.apis.openai.schema import OPENAI_FIELDS, includes_usage, read_openai_decoding
from container.schema.fields import Field, Fields, Values, read_fields, unserved
from container.schema.kinds import ANYTHING, BOOLEAN, INTEGER, Kind, Schema, is_integers, is_list
from core.errors import RequestError

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 1024

Prompt = str | tuple[int, ...]

_DIALECT = Dialect(prompt="prompt")


def _list_of(items: Schema) -> Schema:
    return {"type": "array", "items": items}


_TEXT: Schema = {"type": "string"}
_TOKENS = _list_of({"type": "integer", "minimum": 0})
PROMPT = Kind(
    "a text, a list of texts, a list of token ids or a list of those",
    lambda value: isinstance(value, str) or (is_list(value) and _is_prompts(value)),
    {"anyOf": [_TEXT, _list_of(_TEXT), _TOKENS, _list_of(_TOKENS)]},
)

COMPLETION_FIELDS: Fields = {
    **OPENAI_FIELDS,
    "prompt": Field(PROMPT, "The prompt, or several: as texts or as token ids."),
    "max_tokens": Field(INTEGER, f"Most tokens of the answer (default {DEFAULT_MAX_TOKENS})."),
    "echo": Field(BOOLEAN, "Put the prompt before the answer."),
    "logprobs": Field(
        INTEGER,
        "Give the log-probability of each token, with echo also of the prompt's, "
        "and above 0 so many likely ones for each place.",
    ),
    "add_special_tokens": Field(BOOLEAN, "Begin the prompt as the model expects (default true)."),
    "suffix": unserved(ANYTHING, ""),
}


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A checked request."""

    prompts: tuple[Prompt, ...]
    decoding: Decoding
    model: object
    stream: bool
    include_usage: bool
    echo: bool
    logprobs: bool
    add_special_tokens: bool
    warnings: tuple[str, ...]

    @property
    def n(self) -> int:
        """Choices for each prompt."""
        return self.decoding.params.n

    @property
    def echoes_logprobs(self) -> bool:
        """Whether the prompt's tokens are among those whose log-probabilities are given."""
        return self.echo and self.logprobs


def read_completion_request(body: Mapping[str, object]) -> CompletionRequest:
    """Raises RequestError that names the first mistake."""
    values = read_fields(body, COMPLETION_FIELDS)
    decoding = _decoding(values)
    return CompletionRequest(
        prompts=_prompts(values.get("prompt", "")),
        decoding=decoding,
        model=values.get("model", None),
        stream=values.get("stream", False),
        include_usage=includes_usage(values),
        echo=values.get("echo", False),
        logprobs="logprobs" in values,
        add_special_tokens=values.get("add_special_tokens", True),
        warnings=(*values.warnings, *decoding.warnings),
    )


def _is_prompts(value: list[object]) -> bool:
    return (
        all(isinstance(each, str) for each in value)
        or is_integers(value)
        or all(map(is_integers, value))
    )


def _prompts(prompt: object) -> tuple[Prompt, ...]:
    if isinstance(prompt, str):
        prompts: tuple[Prompt, ...] = (prompt,)
    elif is_integers(prompt):
        prompts = (tuple(prompt),)
    else:
        several = cast(list[str | list[int]], prompt)
        prompts = tuple(each if isinstance(each, str) else tuple(each) for each in several)
    if not all(prompts):
        raise RequestError("prompt", "expected a text, or token ids, that are not empty")
    if len(prompts) > MAX_PROMPTS:
        raise RequestError("prompt", f"at most {MAX_PROMPTS} prompts in a request")
    return prompts


def _decoding(values: Values) -> Decoding:
    """Each token's own log-probability costs nothing; the prompt's are asked for with `echo`."""
    width: int | None = values.get("logprobs", None)
    own: dict[str, object] = {"logprobs": width or None}
    dialect = _DIALECT
    if width is not None and values.get("echo", False):
        if "prompt_logprobs" in values:
            raise RequestError("prompt_logprobs", "does not go with logprobs and echo")
        own["prompt_logprobs"] = width
        dialect = dialect.naming("prompt_logprobs", "logprobs")
    max_tokens = values.get("max_tokens", DEFAULT_MAX_TOKENS)
    return read_openai_decoding(values, dialect, max_tokens=max_tokens, **own)
