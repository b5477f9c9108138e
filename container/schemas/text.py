"""LMI's text schema: `inputs` and `parameters`, one text or a batch of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from container.schemas.fields import Field, Fields, Values, alias, ignored, read_fields, unserved
from container.schemas.kinds import (
    ANYTHING,
    BOOLEAN,
    INTEGER,
    OBJECT,
    TEXT_OR_TEXTS,
    TEXTS,
    is_list,
)
from container.schemas.sampling import SAMPLING_FIELDS, Decoding, Dialect, read_decoding
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
    },
)

_OWN: Fields = {
    "do_sample": Field(BOOLEAN, "Sample; the default is true where a temperature is given."),
    "max_new_tokens": Field(
        INTEGER, f"Most tokens of the answer (default {DEFAULT_MAX_NEW_TOKENS})."
    ),
    "stop_sequences": Field(TEXTS, "Texts that end the answer and are not part of it."),
    "ignore_eos_token": Field(BOOLEAN, "Go on after the model's own end."),
    "details": Field(BOOLEAN, "Say why the answer ended, and its tokens."),
    "decoder_input_details": Field(
        BOOLEAN, "With details: the tokens of the prompt, without log-probabilities."
    ),
    "timings": Field(
        BOOLEAN, "With details: when the request arrived, was admitted, had its first token, ended."
    ),
    "return_full_text": Field(BOOLEAN, "Put the prompt before the answer."),
    "truncate": Field(INTEGER, "Keep only this many tokens, the last ones, of the prompt."),
    "stream": Field(BOOLEAN, "As `stream` beside `inputs`."),
}

PARAMETERS: Fields = {
    **SAMPLING_FIELDS,
    **_OWN,
    "stop": alias("stop_sequences", _OWN),
    "ignore_eos": alias("ignore_eos_token", _OWN),
    "logprobs": unserved(INTEGER, 0, 1, instead="details has each token's own log_prob"),
    "top_n_tokens": unserved(INTEGER, 0),
    "grammar": unserved(ANYTHING),
    "watermark": unserved(BOOLEAN, False),
    "penalty_alpha": unserved(ANYTHING, 0),
    "adapter_id": unserved(ANYTHING, instead="merge the adapter into the model"),
    "adapters": unserved(ANYTHING, instead="merge the adapter into the model"),
    "max_length": unserved(INTEGER, instead="use max_new_tokens"),
    "min_length": unserved(INTEGER, 0),
    "min_new_tokens": unserved(INTEGER, 0),
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
    "adapters": unserved(ANYTHING, instead="merge the adapter into the model"),
    "options": ignored("Options of Hugging Face's hosted API."),
    "model": ignored("One model is served."),
}


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A checked request."""

    inputs: tuple[str | RequestError, ...]
    """An error stands for an input of a batch that is no prompt; the others are answered."""
    is_batch: bool
    decoding: Decoding
    stream: bool
    details: bool
    prompt_details: bool
    timings: bool
    return_full_text: bool
    max_prompt_tokens: int | None
    warnings: tuple[str, ...]


def read_text_request(body: Mapping[str, object]) -> TextRequest:
    """Raises RequestError that names the first mistake."""
    top = read_fields({**body, "inputs": None}, TEXT_FIELDS)
    inputs, is_batch = _inputs(body.get("inputs"))
    given: Mapping[str, object] = top.get("parameters", {})
    parameters = read_fields(given, PARAMETERS, "parameters.")
    request = TextRequest(
        inputs=inputs,
        is_batch=is_batch,
        decoding=_decoding(parameters),
        stream=top.get("stream", parameters.get("stream", False)),
        details=parameters.get("details", False),
        prompt_details=parameters.get("decoder_input_details", False),
        timings=parameters.get("timings", False),
        return_full_text=parameters.get("return_full_text", False),
        max_prompt_tokens=parameters.get("truncate", None),
        warnings=(*top.warnings, *parameters.warnings),
    )
    _check_together(request)
    return request


def _inputs(value: object) -> tuple[tuple[str | RequestError, ...], bool]:
    if not is_list(value):
        return (_text(value),), False
    if not 0 < len(value) <= MAX_BATCH:
        raise RequestError("inputs", f"a batch has 1 to {MAX_BATCH} texts, not {len(value)}")
    return tuple(_text_or_error(each, f"inputs[{at}]") for at, each in enumerate(value)), True


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


def _check_together(request: TextRequest) -> None:
    if request.prompt_details and request.stream:
        raise RequestError("parameters.decoder_input_details", "does not go with stream")
    if request.max_prompt_tokens is not None and request.max_prompt_tokens < 1:
        raise RequestError("parameters.truncate", "must be at least 1")


def _decoding(parameters: Values) -> Decoding:
    """Greedy unless a temperature is given or do_sample is true; do_sample=false is greedy."""
    sampled = parameters.get("do_sample", "temperature" in parameters)
    stop: list[str] = parameters.get("stop_sequences", [])
    return read_decoding(
        parameters,
        _DIALECT,
        temperature=parameters.get("temperature", 1.0) if sampled else 0.0,
        max_tokens=parameters.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS),
        stop=tuple(stop),
        ignore_eos=parameters.get("ignore_eos_token", False),
    )
