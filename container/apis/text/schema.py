"""LMI's text schema: `inputs` and `parameters`, one text or a batch of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from container.apis.generation.forms import TGI_GRAMMAR
from container.apis.generation.sampling import SAMPLING_FIELDS, Decoding, Dialect, read_decoding
from container.schema.fields import Field, Fields, Values, alias, ignored, read_fields, unserved
from container.schema.kinds import (
    ANYTHING,
    BOOLEAN,
    INTEGER,
    OBJECT,
    TEXT_OR_TEXTS,
    TEXTS,
    is_list,
)
from core.errors import RequestError

DEFAULT_MAX_NEW_TOKENS = 30
MAX_BATCH = 1024

_DIALECT = Dialect(
    prompt="inputs",
    prefix="parameters.",
    names={
        "max_tokens": "max_new_tokens",
        "ignore_eos": "ignore_eos_token",
        "stop": "stop_sequences",
        "logprobs": "top_n_tokens",
    },
)

_NOT_STREAMED: Mapping[str, object] = {
    "n": 1,
    "decoder_input_details": False,
    "prompt_logprobs": None,
}
"""What a stream has no place for, by the value that asks for nothing."""
_IN_DETAILS: Mapping[str, object] = {"n": 1, "top_n_tokens": 0, "prompt_logprobs": None}
"""What a whole answer has only in its details, likewise."""

_OWN: Fields = {
    "do_sample": Field(BOOLEAN, "Sample; the default is true where a temperature is given."),
    "max_new_tokens": Field(
        INTEGER, f"Most tokens of the answer (default {DEFAULT_MAX_NEW_TOKENS})."
    ),
    "stop_sequences": Field(TEXTS, "Texts that end the answer and are not part of it."),
    "ignore_eos_token": Field(BOOLEAN, "Go on after the model's own end."),
    "details": Field(BOOLEAN, "Say why the answer ended, and its tokens."),
    "decoder_input_details": Field(
        BOOLEAN, "With details: the tokens of the prompt and their log-probabilities."
    ),
    "timings": Field(
        BOOLEAN, "With details: when the request arrived, was admitted, had its first token, ended."
    ),
    "top_n_tokens": Field(INTEGER, "With details: so many likely tokens for each place."),
    "return_full_text": Field(BOOLEAN, "Put the prompt before the answer."),
    "truncate": Field(INTEGER, "Keep only this many tokens, the last ones, of the prompt."),
    "stream": Field(BOOLEAN, "As `stream` beside `inputs`."),
}

PARAMETERS: Fields = {
    **SAMPLING_FIELDS,
    **_OWN,
    "stop": alias("stop_sequences", _OWN),
    "ignore_eos": alias("ignore_eos_token", _OWN),
    "min_new_tokens": alias("min_tokens", SAMPLING_FIELDS),
    "logprobs": unserved(
        INTEGER, 0, 1, instead="details has each token's own log_prob, top_n_tokens more of them"
    ),
    "grammar": TGI_GRAMMAR,
    "watermark": unserved(BOOLEAN, False),
    "penalty_alpha": unserved(ANYTHING, 0),
    "adapter_id": unserved(ANYTHING, instead="put adapters beside inputs"),
    "adapters": unserved(ANYTHING, instead="put adapters beside inputs"),
    "max_length": unserved(INTEGER, instead="use max_new_tokens"),
    "min_length": unserved(INTEGER, 0),
    "eos_token_id": unserved(ANYTHING, instead="use stop_token_ids"),
    "pad_token_id": ignored("Nothing is padded here."),
    "use_cache": ignored("K and V are always cached."),
    "return_text": ignored(),
    "return_tensors": ignored(),
    "clean_up_tokenization_spaces": ignored(),
    "renormalize_logits": ignored("Probabilities always sum to one."),
}

TEXT_FIELDS: Fields = {
    "inputs": Field(TEXT_OR_TEXTS, "The prompt, or several, each with an answer of its own."),
    "parameters": Field(OBJECT, "How to answer."),
    "stream": Field(BOOLEAN, "Send tokens as they come."),
    "adapters": Field(
        TEXT_OR_TEXTS, "The LoRA adapter to answer with, or one for each of inputs; '' is none."
    ),
    "options": ignored("Options of Hugging Face's hosted API."),
    "model": ignored("One model is served."),
}


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A checked request."""

    inputs: tuple[str | RequestError, ...]
    """An error stands for an input of a batch that is no prompt; the others are answered."""
    is_batch: bool
    adapters: tuple[str | None, ...]
    """For each of the inputs; None where the body names none."""
    decoding: Decoding
    stream: bool
    details: bool
    prompt_details: bool
    timings: bool
    return_full_text: bool
    max_prompt_tokens: int | None
    shows_prompt_logprobs: bool
    warnings: tuple[str, ...]

    @property
    def top_n_tokens(self) -> int | None:
        """Likely tokens to show for each place."""
        return self.decoding.params.logprobs


def read_text_request(body: Mapping[str, object], *, always_details: bool = False) -> TextRequest:
    """`always_details`: as if every request asked for them.

    Raises RequestError that names the first mistake.
    """
    top = read_fields({**body, "inputs": None}, TEXT_FIELDS)
    inputs, is_batch = _inputs(body.get("inputs"))
    given: Mapping[str, object] = top.get("parameters", {})
    parameters = read_fields(given, PARAMETERS, "parameters.")
    stream = top.get("stream", parameters.get("stream", False))
    details = always_details or parameters.get("details", False)
    prompt_details = details and parameters.get("decoder_input_details", False)
    decoding = _decoding(
        parameters, shows_all=details and not stream, prompt_details=prompt_details
    )
    _check_together(parameters, stream=stream, details=details)
    return TextRequest(
        inputs=inputs,
        is_batch=is_batch,
        adapters=_adapters(top.get("adapters", None), len(inputs), is_batch=is_batch),
        decoding=decoding,
        stream=stream,
        details=details,
        prompt_details=prompt_details,
        timings=parameters.get("timings", False),
        return_full_text=parameters.get("return_full_text", False),
        max_prompt_tokens=parameters.get("truncate", None),
        shows_prompt_logprobs="prompt_logprobs" in parameters,
        warnings=(*top.warnings, *parameters.warnings, *decoding.warnings),
    )


def _inputs(value: object) -> tuple[tuple[str | RequestError, ...], bool]:
    if not is_list(value):
        return (_text(value),), False
    if not 0 < len(value) <= MAX_BATCH:
        raise RequestError("inputs", f"a batch has 1 to {MAX_BATCH} texts, not {len(value)}")
    return tuple(_text_or_error(each, f"inputs[{at}]") for at, each in enumerate(value)), True


def _adapters(
    given: str | list[str] | None, count: int, *, is_batch: bool
) -> tuple[str | None, ...]:
    if not isinstance(given, list):
        return (given,) * count
    if not is_batch or len(given) != count:
        raise RequestError("adapters", f"a list has one for each of a list of inputs, {count}")
    return tuple(given)


def _text_or_error(value: object, field: str) -> str | RequestError:
    try:
        return _text(value, field)
    except RequestError as error:
        return error


def _text(value: object, field: str = "inputs") -> str:
    if not isinstance(value, str) or not value:
        raise RequestError(field, f"expected one text that is not empty, not {_named(value)}")
    return value


def _named(value: object) -> str:
    match value:
        case None:
            return "nothing"
        case str():
            return "an empty one"
        case list():
            return "a list"
        case dict():
            return "an object"
        case _:
            return "a number or a truth value"


def _check_together(parameters: Values, *, stream: bool, details: bool) -> None:
    """Raises RequestError for what the form of the answer has no place for."""
    if stream:
        _refuse(parameters, _NOT_STREAMED, "does not go with stream")
    elif not details:
        _refuse(parameters, _IN_DETAILS, "needs details=true")
    if parameters.get("truncate", 1) < 1:
        raise RequestError("parameters.truncate", "must be at least 1")


def _refuse(parameters: Values, without_place: Mapping[str, object], why: str) -> None:
    for name, nothing in without_place.items():
        if parameters.get(name, nothing) != nothing:
            raise RequestError(f"parameters.{name}", why)


def _decoding(parameters: Values, *, shows_all: bool, prompt_details: bool) -> Decoding:
    """Greedy unless a temperature is given or do_sample is true; do_sample=false is greedy."""
    sampled = parameters.get("do_sample", "temperature" in parameters)
    stop: list[str] = parameters.get("stop_sequences", [])
    own, dialect = _num_answers(parameters, shows_all=shows_all), _DIALECT
    if prompt_details and "prompt_logprobs" not in parameters:
        own["prompt_logprobs"] = 0
        dialect = dialect.naming("prompt_logprobs", "decoder_input_details")
    decoding = read_decoding(
        parameters,
        dialect,
        max_tokens=parameters.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS),
        stop=tuple(stop),
        temperature=parameters.get("temperature", 1.0) if sampled else 0.0,
        ignore_eos=parameters.get("ignore_eos_token", False),
        logprobs=parameters.get("top_n_tokens", 0) or None,
        **own,
    )
    if decoding.params.beam_width and parameters.get("do_sample", False):
        raise RequestError("parameters.do_sample", "does not go with beam search")
    return decoding


def _num_answers(parameters: Values, *, shows_all: bool) -> dict[str, int | None]:
    """One of several answers is the first, so they are ranked; `best_of` alone shows all of them.

    `shows_all`: whether the form of the answer has a place for more than one.
    """
    n: int | None = parameters.get("n", None)
    best_of: int | None = parameters.get("best_of", None)
    if n is None and shows_all:
        n = best_of
    if best_of is None and parameters.get("num_beams", 1) == 1:
        best_of = n
    return {"n": n, "best_of": best_of}
