"""The sampling parameters that all text generation APIs share, and which of them are supported.

Fields that constrain the format of an answer are in `structured_outputs`.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from container.apis.generation.structured_outputs import (
    FORMAT_FIELDS,
    STRUCTURED_OUTPUT_FIELDS,
    read_format,
    read_structured_outputs,
)
from container.schema.fields import Field, Fields, Values
from container.schema.kinds import (
    BIASES,
    BOOLEAN,
    INTEGER,
    NUMBER,
    STRING,
    STRINGS,
    TOKEN_IDS,
    Kind,
    with_schema,
)
from core.configuration import limits
from core.errors import RequestError
from core.sampling import BOUNDS, NO_LIMIT, Operation, SamplingParams
from core.structured_outputs import StructuredOutputsParams

NO_SEED = -1
"""The seed by which clients of vLLM and of hosted APIs ask for a random seed."""

_EARLY_STOPPING = Kind(
    'true, false or "never"',
    lambda value: isinstance(value, bool) or value == "never",
    {"enum": [True, False, "never"]},
)


def bounded(kind: Kind, name: str, **schema: object) -> Kind:
    """Return the kind with the bounds of a field of SamplingParams, which also checks them.

    schema: bounds of the API's that differ.
    """
    least, greatest = BOUNDS[name]
    return with_schema(kind, {"minimum": least, "maximum": greatest, **schema})


SAMPLING_FIELDS: Fields = {
    "temperature": Field(
        bounded(NUMBER, "temperature"), "0: decoding is greedy. Above 0: tokens are sampled."
    ),
    "top_p": Field(
        bounded(NUMBER, "top_p", exclusiveMinimum=0),
        "Sample from the most likely tokens whose probabilities add up to this number.",
    ),
    "top_k": Field(
        bounded(INTEGER, "top_k"),
        "Sample from this many of the most likely tokens. 0 or -1: from all tokens.",
    ),
    "repetition_penalty": Field(
        bounded(NUMBER, "repetition_penalty"),
        "A value above 1 makes tokens of the prompt and the answer less likely.",
    ),
    "seed": Field(
        bounded(INTEGER, "seed", minimum=NO_SEED),
        "The same seed gives the same answer. -1: a random seed.",
    ),
    "stop_token_ids": Field(TOKEN_IDS, "Tokens that end the answer.", limit=limits.STOP_TOKEN_IDS),
    "skip_special_tokens": Field(BOOLEAN, "Remove special tokens from the text (default true)."),
    "include_stop_str_in_output": Field(BOOLEAN, "Keep the stop string at the end of the answer."),
    "min_p": Field(
        bounded(NUMBER, "min_p"),
        "Drop tokens that have less than this fraction of the most likely token's probability.",
    ),
    "typical_p": Field(
        bounded(NUMBER, "typical_p", exclusiveMinimum=0),
        "Sample from the most typical tokens whose probabilities add up to this number.",
    ),
    "presence_penalty": Field(
        bounded(NUMBER, "presence_penalty"),
        "This number is subtracted from the logits of tokens that the answer already has.",
    ),
    "frequency_penalty": Field(
        bounded(NUMBER, "frequency_penalty"),
        "This number is subtracted from a token's logit once for each time that the answer has it.",
    ),
    "min_tokens": Field(
        bounded(INTEGER, "min_tokens"), "The answer cannot end before it has this many tokens."
    ),
    "logit_bias": Field(
        BIASES,
        "Maps token ids to numbers, which are added to the tokens' logits.",
        limit=limits.LOGIT_BIAS,
    ),
    "bad_words": Field(STRINGS, "Strings that are not generated.", limit=limits.BAD_WORDS),
    "spaces_between_special_tokens": Field(
        BOOLEAN, "Put spaces between special tokens (default true)."
    ),
    "detokenize": Field(BOOLEAN, "false: return token ids, and an empty text (default true)."),
    "priority": Field(
        bounded(INTEGER, "priority"),
        "Requests with lower values are admitted first and preempted last (default 0).",
    ),
    "allowed_token_ids": Field(
        TOKEN_IDS, "The only tokens that may be generated.", limit=limits.ALLOWED_TOKEN_IDS
    ),
    "n": Field(bounded(INTEGER, "n"), "Number of answers to a prompt (default 1)."),
    "num_return_sequences": Field(bounded(INTEGER, "n"), "The same as `n`.", canonical_name="n"),
    "best_of": Field(
        bounded(INTEGER, "best_of"),
        "Number of answers to sample. The n most likely of them are returned.",
    ),
    "num_beams": Field(
        bounded(INTEGER, "num_beams"),
        "Above 1: use beam search with this many beams, and return n of them.",
    ),
    "use_beam_search": Field(
        BOOLEAN, "Use beam search with best_of beams or, without best_of, with n beams."
    ),
    "length_penalty": Field(
        bounded(NUMBER, "length_penalty"),
        "Beam search: a value above 0 favours longer answers (-32 to 32, default 1).",
    ),
    "early_stopping": Field(
        _EARLY_STOPPING, "Beam search: stop as soon as num_beams answers are complete."
    ),
    "prompt_logprobs": Field(
        bounded(INTEGER, "prompt_logprobs"),
        "Return this many of the most likely tokens at each position of the prompt.",
    ),
    "cache_salt": Field(
        STRING,
        "Requests share cached prefixes only if they have the same salt, such as a tenant's name.",
    ),
    "no_repeat_ngram_size": Field(
        bounded(INTEGER, "no_repeat_ngram_size"),
        "No sequence of this many tokens occurs twice in the prompt and the answer together.",
    ),
    **STRUCTURED_OUTPUT_FIELDS,
}

_NOT_FOR_ONE_ANSWER = {
    "n", "num_return_sequences", "best_of", "num_beams", "use_beam_search", "length_penalty",
    "early_stopping", "prompt_logprobs", "detokenize",
}  # fmt: skip
ONE_ANSWER_FIELDS: Fields = {
    name: field for name, field in SAMPLING_FIELDS.items() if name not in _NOT_FOR_ONE_ANSWER
}
"""The fields for APIs that return one answer, as text only."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """Names that one API uses, so that errors name the fields that the client sent."""

    prompt: str
    """The field with the prompt."""
    prefix: str = ""
    """Precedes the name of every other field."""
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    """Maps the name of a field of SamplingParams to the API's name, where the two differ."""
    operation: Operation = "text_completion"
    """The name of the operation in traces."""

    def with_name(self, field: str, name: str) -> Dialect:
        """Return a copy with another name for a field of SamplingParams."""
        return replace(self, names={**self.names, field: name})

    def name(self, field: str) -> str:
        """Return the API's name, with the prefix, of a field of SamplingParams."""
        return f"{self.prefix}{self.names.get(field, field)}"

    def error(self, error: RequestError) -> RequestError:
        """Translate the error's field, which is one of SamplingParams or `prompt`."""
        name = self.prompt if error.field == "prompt" else self.name(error.field)
        return RequestError(name, error.message)

    @contextmanager
    def names_errors(self) -> Generator[None]:
        """Translate the field of a RequestError that the block raises."""
        try:
            yield
        except RequestError as error:
            raise self.error(error) from None


@dataclass(frozen=True, slots=True)
class Decoding:
    """The sampling parameters of a request. The front end handles `params.stop`, as the engine sees
    no text."""

    params: SamplingParams
    dialect: Dialect
    warnings: tuple[str, ...] = ()
    """One sentence for each ignored field."""

    @property
    def has_form(self) -> bool:
        """Whether the request fixes the format of its answer."""
        return self.params.structured_outputs is not None

    def check_result(self, num_prompt_tokens: int) -> None:
        """Raise RequestError if what the response shows of the prompt is too large."""
        if self.params.prompt_logprobs is not None:
            size = num_prompt_tokens * (self.params.prompt_logprobs + 1)
            limits.PROMPT_LOGPROBS.check(self.dialect.name("prompt_logprobs"), size)

    def with_format(
        self, format: Mapping[str, Any], field: str, types: Sequence[str] = ()
    ) -> Decoding:
        """Return a copy for the format in `field`, as `read_format` reads it."""
        form = read_format(format, field, types)
        return self if form is None else self.with_form(form, field)

    def with_form(self, form: StructuredOutputsParams, field: str) -> Decoding:
        """Return a copy with these structured outputs, which come from `field` of the request.

        Raises RequestError if the request already has structured outputs, or if these cannot be
        combined with the other parameters.
        """
        if self.has_form:
            raise RequestError(field, "cannot be combined with structured outputs")
        dialect = self.dialect.with_name("structured_outputs", field)
        with dialect.names_errors():
            combined = msgspec.structs.replace(self.params, structured_outputs=form)
        return replace(self, params=combined, dialect=dialect)


def read_decoding(
    values: Values,
    dialect: Dialect,
    *,
    max_tokens: int | None,
    stop: tuple[str, ...],
    **own: object,
) -> Decoding:
    """Read the fields of SAMPLING_FIELDS from an API's values.

    own: fields of SamplingParams that the API names differently or has a default for. Values of
    None are left out. Without `max_tokens` an answer may fill the context. Raises RequestError
    that names the client's field.
    """
    if stop:
        _check_stop_strings(stop, dialect.name("stop"))
    if not values.given.keys().isdisjoint(FORMAT_FIELDS):
        dialect = _read_format(values, dialect, own)
    named = {name: values.given[name] for name in _PARAMS if name in values}
    if named.get("seed") == NO_SEED:
        del named["seed"]
    limit = NO_LIMIT if max_tokens is None else max_tokens
    own = {name: value for name, value in own.items() if value is not None}
    fields = {**named, **own, "stop": stop, "max_tokens": limit}
    with dialect.names_errors():
        params = msgspec.convert(fields, SamplingParams, str_keys=True)
    is_plain = values.given.keys().isdisjoint(_ONLY_FOR_BEAMS)
    return Decoding(params, dialect, () if is_plain else _beam_warnings(values, params, dialect))


def _read_format(values: Values, dialect: Dialect, own: dict[str, object]) -> Dialect:
    """Add the answer's format to `own`, if the values set one. Return the dialect that names it."""
    structured = read_structured_outputs(values, dialect.prefix)
    if structured is None:
        return dialect
    own["structured_outputs"] = structured.params
    return dialect.with_name("structured_outputs", structured.field)


_PARAMS = [
    name
    for name in SamplingParams.__struct_fields__
    if name in SAMPLING_FIELDS and name not in STRUCTURED_OUTPUT_FIELDS
]


_ONLY_FOR_BEAMS = ("length_penalty", "early_stopping")


def _beam_warnings(values: Values, params: SamplingParams, dialect: Dialect) -> tuple[str, ...]:
    if params.beam_width:
        return ()
    return tuple(
        f"{dialect.name(name)} has no effect without beam search"
        for name in _ONLY_FOR_BEAMS
        if name in values
    )


def _check_stop_strings(strings: tuple[str, ...], name: str) -> None:
    limits.STOP_STRINGS.check(name, len(strings))
    for string in strings:
        limits.STOP_CHARACTERS.check(name, len(string))
