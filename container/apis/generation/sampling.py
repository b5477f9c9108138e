"""What a request of any API may ask of decoding, and which of it the engine can do.

This is the one place that says so. What an answer must look like stands in `forms`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import msgspec

from container.apis.generation.forms import FORM_FIELDS, read_form
from container.schema.fields import Field, Fields, Values
from container.schema.kinds import (
    BIASES,
    BOOLEAN,
    INTEGER,
    INTEGERS,
    NUMBER,
    TEXTS,
    Kind,
)
from core.errors import RequestError
from core.sampling import NO_LIMIT, SamplingParams
from core.structured_outputs import StructuredOutputsParams

MAX_STOP_TEXTS = 16
MAX_STOP_CHARACTERS = 1000

_EARLY_STOPPING = Kind(
    'true, false or "never"',
    lambda value: isinstance(value, bool) or value == "never",
    {"enum": [True, False, "never"]},
)

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
    "allowed_token_ids": Field(INTEGERS, "The only tokens that are generated."),
    "n": Field(INTEGER, "Answers to the one prompt (default 1)."),
    "num_return_sequences": Field(INTEGER, "The same as `n`.", first_name="n"),
    "best_of": Field(INTEGER, "Answers to sample, of which the n likeliest are given at the end."),
    "num_beams": Field(INTEGER, "Above 1: beam search with so many beams; n of them are given."),
    "use_beam_search": Field(BOOLEAN, "Beam search with best_of beams, else n."),
    "length_penalty": Field(NUMBER, "Beam search: above 0 favours longer answers (default 1)."),
    "early_stopping": Field(
        _EARLY_STOPPING, "Beam search: end it when there are as many whole answers as beams."
    ),
    "prompt_logprobs": Field(INTEGER, "So many likely tokens for each place of the prompt."),
    "no_repeat_ngram_size": Field(
        INTEGER, "So many tokens in a row are not repeated, neither the prompt's nor the answer's."
    ),
    **FORM_FIELDS,
}


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one API spells what it asks of decoding, so that errors use the client's own words."""

    prompt: str
    prefix: str = ""
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    """By the field of SamplingParams, where it differs."""

    def naming(self, field: str, name: str) -> Dialect:
        """The same with this name for a field of SamplingParams."""
        return replace(self, names={**self.names, field: name})

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
    warnings: tuple[str, ...] = ()
    """What was passed over, a sentence each."""

    def with_form(self, form: StructuredOutputsParams, field: str) -> Decoding:
        """The same with another form of the answer, which that field of the request says.

        Raises RequestError where it does not go with the rest.
        """
        dialect = self.dialect.naming("structured_outputs", field)
        try:
            params = msgspec.structs.replace(self.params, structured_outputs=form)
        except RequestError as error:
            raise dialect.error(error) from None
        return replace(self, params=params, dialect=dialect)


def read_decoding(
    values: Values,
    dialect: Dialect,
    *,
    max_tokens: int | None,
    stop: tuple[str, ...],
    **own: object,
) -> Decoding:
    """`own`: fields of SamplingParams that the API spells in its own way, or has a default for.

    Raises RequestError in the client's words. Without `max_tokens` the context is the limit.
    """
    _check_stop_texts(stop, dialect.name("stop"))
    form = read_form(values, dialect.prefix)
    if form is not None:
        dialect = dialect.naming("structured_outputs", form.field)
        own["structured_outputs"] = form.params
    named = {name: values.given[name] for name in _PARAMS if name in values}
    limit = NO_LIMIT if max_tokens is None else max_tokens
    given = {name: value for name, value in own.items() if value is not None}
    asked = {**named, **given, "stop": stop, "max_tokens": limit}
    try:
        params = msgspec.convert(asked, SamplingParams, str_keys=True)
    except RequestError as error:
        raise dialect.error(error) from None
    passed_over = () if params.beam_width else ("length_penalty", "early_stopping")
    return Decoding(
        params,
        dialect,
        fills_context=max_tokens is None,
        warnings=tuple(
            f"{dialect.name(name)} has no effect without beam search"
            for name in passed_over
            if name in values
        ),
    )


_PARAMS = [
    name
    for name in SamplingParams.__struct_fields__
    if name in SAMPLING_FIELDS and name not in FORM_FIELDS
]


def _check_stop_texts(texts: tuple[str, ...], name: str) -> None:
    if len(texts) > MAX_STOP_TEXTS:
        raise RequestError(name, f"at most {MAX_STOP_TEXTS} texts")
    if any(len(text) > MAX_STOP_CHARACTERS for text in texts):
        raise RequestError(name, f"at most {MAX_STOP_CHARACTERS} characters in a text")
