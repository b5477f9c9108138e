"""What a request of any API may ask of decoding, and which of it the engine can do.

This is the one place that says so: a field that `SamplingParams` learns becomes served when its
row below turns from `unserved(...)` into `Field(...)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from container.schemas.fields import Field, Fields, Values, ignored, unserved
from container.schemas.kinds import (
    ANYTHING,
    BIASES,
    BOOLEAN,
    INTEGER,
    INTEGERS,
    NUMBER,
    TEXTS,
)
from core.errors import RequestError
from core.sampling import NO_LIMIT, SamplingParams

MAX_STOP_TEXTS = 16
MAX_STOP_CHARACTERS = 1000

SAMPLING_FIELDS: Fields = {
    "temperature": Field(NUMBER, "Above 0 the answer is sampled; 0 is greedy."),
    "top_p": Field(NUMBER, "Sample from the most likely tokens of this probability together."),
    "top_k": Field(INTEGER, "Sample from this many most likely tokens; 0 or -1 means all."),
    "repetition_penalty": Field(NUMBER, "Above 1, tokens seen before become less likely."),
    "seed": Field(INTEGER, "The same seed gives the same answer."),
    "stop_token_ids": Field(INTEGERS, "Tokens that end the answer."),
    "skip_special_tokens": Field(BOOLEAN, "Leave special tokens out of the text (default true)."),
    "include_stop_str_in_output": Field(BOOLEAN, "Leave a stop text at the end of the answer."),
    "min_p": Field(NUMBER, "Leave out tokens with less than this share of the likeliest's chance."),
    "typical_p": Field(NUMBER, "Sample from the most typical tokens of this probability together."),
    "presence_penalty": Field(NUMBER, "Taken from the score of tokens in the answer so far."),
    "frequency_penalty": Field(NUMBER, "The same for each time that they are in it."),
    "min_tokens": Field(INTEGER, "Tokens before which nothing ends the answer."),
    "logit_bias": Field(BIASES, "Token ids, and what is added to the score of each."),
    "bad_words": Field(TEXTS, "Texts that are not generated."),
    "spaces_between_special_tokens": Field(BOOLEAN, "Space special tokens (default true)."),
    "priority": Field(INTEGER, "Lower ones are admitted first and preempted last (default 0)."),
    "n": unserved(INTEGER, 1),
    "best_of": unserved(INTEGER, 1),
    "num_return_sequences": unserved(INTEGER, 1),
    "num_beams": unserved(INTEGER, 1),
    "use_beam_search": unserved(BOOLEAN, False),
    "no_repeat_ngram_size": unserved(INTEGER, 0, instead="use repetition_penalty"),
    "allowed_token_ids": unserved(INTEGERS, []),
    "prompt_logprobs": unserved(INTEGER),
    "guided_json": unserved(ANYTHING),
    "guided_regex": unserved(ANYTHING),
    "guided_choice": unserved(ANYTHING),
    "guided_grammar": unserved(ANYTHING),
    "structured_outputs": unserved(ANYTHING),
    "length_penalty": ignored("Only beam search has it, which is not served."),
    "early_stopping": ignored("Only beam search has it, which is not served."),
}


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one API spells what it asks of decoding, so that errors use the client's own words."""

    prompt: str
    prefix: str = ""
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    """By the field of SamplingParams, where it differs."""

    def name(self, field: str) -> str:
        return f"{self.prefix}{self.names.get(field, field)}"

    def error(self, error: RequestError) -> RequestError:
        """The same error, whose field is so far one of SamplingParams, or `prompt`."""
        name = self.prompt if error.field == "prompt" else self.name(error.field)
        return RequestError(name, error.message)


@dataclass(frozen=True, slots=True)
class Decoding:
    """What a request asks of decoding. `params.stop` is for the front end, which sees text."""

    params: SamplingParams
    dialect: Dialect
    fills_context: bool = False
    """The answer may be as long as the model allows, whatever `params.max_tokens` says."""


def read_decoding(
    values: Values,
    dialect: Dialect,
    *,
    temperature: float,
    max_tokens: int | None,
    stop: tuple[str, ...] = (),
    ignore_eos: bool = False,
) -> Decoding:
    """Raises RequestError in the client's words. Without `max_tokens` the context is the limit."""
    _check_stop_texts(stop, dialect.name("stop"))
    named = {name: values.given[name] for name in _PARAMS if name in values}
    asked = {
        **named,
        "temperature": temperature,
        "stop": stop,
        "ignore_eos": ignore_eos,
        "max_tokens": NO_LIMIT if max_tokens is None else max_tokens,
    }
    try:
        params = msgspec.convert(asked, SamplingParams, str_keys=True)
    except RequestError as error:
        raise dialect.error(error) from None
    return Decoding(params, dialect, fills_context=max_tokens is None)


_PARAMS = [name for name in SamplingParams.__struct_fields__ if name in SAMPLING_FIELDS]


def _check_stop_texts(texts: tuple[str, ...], name: str) -> None:
    if len(texts) > MAX_STOP_TEXTS:
        raise RequestError(name, f"at most {MAX_STOP_TEXTS} texts")
    if any(len(text) > MAX_STOP_CHARACTERS for text in texts):
        raise RequestError(name, f"at most {MAX_STOP_CHARACTERS} characters in a text")
