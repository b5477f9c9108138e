"""The request fields of OpenAI's completions API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from container.apis.generation.sampling import Decoding, Dialect, bounded
from container.apis.named_model import NamedModel, read_model
from container.apis.openai import (
    OPENAI_FIELDS,
    ResponseOptions,
    StreamUsage,
    read_openai_decoding,
    read_response_options,
    read_stream_usage,
)
from container.schema.fields import Field, Fields, Values, read_fields, unsupported
from container.schema.kinds import ANYTHING, BOOLEAN, INTEGER
from container.schema.prompts import PROMPT, read_prompts
from core.configuration.limits import INPUTS
from core.errors import RequestError

DEFAULT_MAX_TOKENS = 16

Prompt = str | tuple[int, ...]

_DIALECT = Dialect(prompt="prompt")


COMPLETION_FIELDS: Fields = {
    **OPENAI_FIELDS,
    "prompt": Field(PROMPT, "One prompt or several, as strings or as token ids."),
    "max_tokens": Field(
        bounded(INTEGER, "max_tokens", minimum=0),
        f"Maximum number of generated tokens (default {DEFAULT_MAX_TOKENS}). "
        "0 together with echo: only score the prompt.",
    ),
    "max_completion_tokens": Field(
        bounded(INTEGER, "max_tokens", minimum=0),
        "The same as `max_tokens`.",
        canonical_name="max_tokens",
    ),
    "echo": Field(BOOLEAN, "Return the prompt followed by the answer."),
    "logprobs": Field(
        bounded(INTEGER, "logprobs"),
        "Return the logprob of each token, and this many of the most likely tokens at each "
        "position. With echo, this includes the prompt's tokens.",
    ),
    "add_special_tokens": Field(
        BOOLEAN, "Add the tokens that the model expects at the start of a prompt (default true)."
    ),
    "suffix": unsupported(ANYTHING, ""),
}


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    prompts: tuple[Prompt, ...]
    decoding: Decoding
    model: NamedModel
    stream: bool
    stream_usage: StreamUsage
    response_options: ResponseOptions
    echo: bool
    only_echo: bool
    """Whether to return the prompt without an answer (`max_tokens=0`)."""
    logprobs: bool
    add_special_tokens: bool
    warnings: tuple[str, ...]

    @property
    def n(self) -> int:
        """Number of choices for each prompt."""
        return self.decoding.params.n

    @property
    def echoes_logprobs(self) -> bool:
        """Whether `logprobs` also covers the prompt's tokens."""
        return self.echo and self.logprobs


def read_completion_request(body: Mapping[str, object]) -> CompletionRequest:
    """Check a request. Raises RequestError, naming the first bad field."""
    values = read_fields(body, COMPLETION_FIELDS)
    decoding, stream_usage = _decoding(values), read_stream_usage(values)
    return CompletionRequest(
        prompts=_prompts(values.get("prompt", "")),
        decoding=decoding,
        model=read_model(values),
        stream=values.get("stream", False),
        stream_usage=stream_usage,
        response_options=read_response_options(values),
        echo=values.get("echo", False),
        only_echo=values.get("max_tokens", DEFAULT_MAX_TOKENS) == 0,
        logprobs="logprobs" in values,
        add_special_tokens=values.get("add_special_tokens", True),
        warnings=(*values.warnings, *stream_usage.warnings, *decoding.warnings),
    )


def _prompts(value: object) -> tuple[Prompt, ...]:
    prompts = read_prompts("prompt", value, INPUTS)
    return tuple(prompt if isinstance(prompt, str) else tuple(prompt) for prompt in prompts)


def _decoding(values: Values) -> Decoding:
    """Read the sampling parameters. With `echo`, `logprobs` also sets `prompt_logprobs`.

    The engine always returns the logprobs of the generated tokens. So for a request with
    `logprobs=0`, SamplingParams.logprobs stays unset.
    """
    if "truncate_prompt_tokens" in values and values.get("echo", False):
        raise RequestError("truncate_prompt_tokens", "cannot be combined with echo")
    num_top: int | None = values.get("logprobs", None)
    logprobs: dict[str, object] = {"logprobs": num_top or None}
    dialect = _DIALECT
    if num_top is not None and values.get("echo", False):
        if "prompt_logprobs" in values:
            raise RequestError("prompt_logprobs", "cannot be combined with logprobs and echo")
        logprobs["prompt_logprobs"] = num_top
        dialect = dialect.with_name("prompt_logprobs", "logprobs")
    max_tokens = values.get("max_tokens", DEFAULT_MAX_TOKENS)
    if max_tokens == 0 and values.get("echo", False):
        max_tokens = 1  # the engine samples a token for every request; the response drops it
    return read_openai_decoding(values, dialect, max_tokens=max_tokens, **logprobs)
