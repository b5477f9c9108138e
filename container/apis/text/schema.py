"""The request fields of LMI's text schema: `inputs` (one prompt or a batch) and `parameters`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from container.apis.generation.generation import Generation
from container.apis.generation.reply import Record
from container.apis.generation.sampling import (
    SAMPLING_FIELDS,
    Decoding,
    Dialect,
    bounded,
    read_decoding,
)
from container.apis.generation.structured_outputs import TGI_GRAMMAR
from container.apis.named_model import (
    INPUT_FIELDS,
    NO_MODEL,
    NOT_PARAMETERS,
    NamedModel,
    read_models,
)
from container.apis.scores import prompt_logprobs
from container.schema.fields import (
    MODEL_IGNORED,
    Field,
    Fields,
    Values,
    alias,
    ignored,
    read_fields,
    unsupported,
)
from container.schema.kinds import (
    ANYTHING,
    BOOLEAN,
    INTEGER,
    MAX_COUNT,
    OBJECT,
    STRING_OR_STRINGS,
    integer,
    is_list,
)
from core.configuration.limits import INPUTS
from core.errors import RequestError
from core.text.tokenizer import Tokenizer

DEFAULT_MAX_NEW_TOKENS = 30
MAX_BATCH = INPUTS.maximum

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
_DIALECT_OF_DETAILS = _DIALECT.with_name("prompt_logprobs", "decoder_input_details")
"""For requests whose details have the logprobs of the prompt."""

_IN_STREAM: tuple[Mapping[str, object], str] = (
    {"n": 1, "decoder_input_details": False, "prompt_logprobs": None},
    "cannot be combined with stream",
)
"""The only values allowed in a stream, since others add results that its records cannot show; and
the error for those."""
_WITHOUT_DETAILS: tuple[Mapping[str, object], str] = (
    {"n": 1, "top_n_tokens": 0, "prompt_logprobs": None},
    "needs details=true",
)
"""The same without `details`, since others add results that only `details` shows."""

_LMI_PARAMETERS: Fields = {
    "do_sample": Field(BOOLEAN, "Sample tokens. The default is true if a temperature is given."),
    "max_new_tokens": Field(
        bounded(INTEGER, "max_tokens"),
        f"Maximum number of generated tokens (default {DEFAULT_MAX_NEW_TOKENS}).",
    ),
    "stop_sequences": Field(
        STRING_OR_STRINGS,
        "One or more stop strings. A stop string ends the answer and is not part of it.",
    ),
    "ignore_eos_token": Field(BOOLEAN, "Keep generating after the end-of-sequence token."),
    "details": Field(BOOLEAN, "Return the finish reason and the tokens."),
    "decoder_input_details": Field(
        BOOLEAN, "With details: return the prompt's tokens and their logprobs."
    ),
    "timings": Field(
        BOOLEAN,
        "With details: return when the request arrived, was admitted, got its first token and "
        "ended.",
    ),
    "receipt": Field(
        BOOLEAN,
        "With details: return what the request has cost. null without option.receipts.",
    ),
    "top_n_tokens": Field(
        bounded(INTEGER, "logprobs"),
        "With details: return this many of the most likely tokens at each position.",
    ),
    "return_full_text": Field(BOOLEAN, "Return the prompt followed by the answer."),
    "truncate": Field(
        integer(1, MAX_COUNT),
        "Keep only this many tokens from the end of the prompt.",
    ),
    "stream": Field(BOOLEAN, "The same as `stream` at the top level, beside `inputs`."),
}

PARAMETERS: Fields = {
    **SAMPLING_FIELDS,
    **_LMI_PARAMETERS,
    "stop": alias("stop_sequences", _LMI_PARAMETERS),
    "ignore_eos": alias("ignore_eos_token", _LMI_PARAMETERS),
    "min_new_tokens": alias("min_tokens", SAMPLING_FIELDS),
    "logprobs": unsupported(
        INTEGER,
        0,
        1,
        instead="details has each token's logprob, and top_n_tokens adds the most likely tokens",
    ),
    "grammar": TGI_GRAMMAR,
    "watermark": unsupported(BOOLEAN, False),
    "penalty_alpha": unsupported(ANYTHING, 0),
    **NOT_PARAMETERS,
    "max_length": unsupported(INTEGER, instead="use max_new_tokens"),
    "min_length": unsupported(INTEGER, 0),
    "eos_token_id": unsupported(ANYTHING, instead="use stop_token_ids"),
    "pad_token_id": ignored("Batches are not padded."),
    "use_cache": ignored("The KV cache is always used."),
    "return_text": ignored(),
    "return_tensors": ignored(),
    "clean_up_tokenization_spaces": ignored(),
    "renormalize_logits": ignored("Probabilities always sum to one."),
}

TEXT_FIELDS: Fields = {
    "inputs": Field(
        STRING_OR_STRINGS, "A prompt, or a batch of prompts that are answered independently."
    ),
    "parameters": Field(OBJECT, "The sampling parameters and the format of the response."),
    "stream": Field(BOOLEAN, "Stream the tokens."),
    "max_new_tokens": Field(
        bounded(INTEGER, "max_tokens"), "The same as `parameters.max_new_tokens`."
    ),
    **INPUT_FIELDS,
    "options": ignored("Options of Hugging Face's hosted API."),
    "model": MODEL_IGNORED,
}


@dataclass(frozen=True, slots=True)
class Batch:
    """The inputs of a batch, and the model that each names."""

    inputs: Sequence[object]
    """Each is still to be checked, so that a bad one fails alone."""
    models: Sequence[NamedModel]


@dataclass(frozen=True, slots=True)
class TextRequest:
    text: str
    """The input; '' for those of a batch."""
    model: NamedModel
    """NO_MODEL for a batch."""
    batch: Batch | None
    decoding: Decoding
    stream: bool
    details: bool
    prompt_details: bool
    timings: bool
    receipt: bool
    return_full_text: bool
    max_prompt_tokens: int | None
    shows_prompt_logprobs: bool
    warnings: tuple[str, ...]

    @property
    def top_n_tokens(self) -> int | None:
        """Number of most likely tokens to return at each position, or None."""
        return self.decoding.params.logprobs

    def prompt_fields(self, generation: Generation, tokenizer: Tokenizer) -> Record:
        """Return vLLM's fields about the prompt for the details."""
        if not self.shows_prompt_logprobs:
            return {}
        return {"prompt_logprobs": prompt_logprobs(generation, tokenizer)}

    def of_input(self, batch: Batch, index: int) -> TextRequest:
        """Return the request for one input of its batch. Errors name that input.

        Raises RequestError if the input is not a text.
        """
        field = f"inputs[{index}]"
        dialect = replace(self.decoding.dialect, prompt=field)
        return replace(
            self,
            text=input_text(batch.inputs[index], field),
            model=batch.models[index],
            decoding=replace(self.decoding, dialect=dialect),
        )


def read_text_request(body: Mapping[str, object], *, always_details: bool = False) -> TextRequest:
    """Check a request. With `always_details`, it is read as if it had `details=true`.

    Raises RequestError, naming the first bad field.
    """
    top_level = read_fields({**body, "inputs": None}, TEXT_FIELDS)
    inputs = body.get("inputs")
    batch = _batch(inputs, top_level) if is_list(inputs) else None
    text = input_text(inputs) if batch is None else ""
    model = NO_MODEL
    if batch is None and not INPUT_FIELDS.keys().isdisjoint(top_level.given):
        (model,) = read_models(top_level, None)
    parameter_body: Mapping[str, object] = top_level.get("parameters", {})
    if "max_new_tokens" in top_level:
        parameter_body = _with_max_new_tokens(parameter_body, top_level)
    parameters = read_fields(parameter_body, PARAMETERS, "parameters.")
    stream = top_level.get("stream", parameters.get("stream", False))
    details = always_details or parameters.get("details", False)
    prompt_details = details and parameters.get("decoder_input_details", False)
    decoding = _decoding(
        parameters, returns_all=details and not stream, prompt_details=prompt_details
    )
    _check_combinations(parameters, stream=stream, details=details)
    return TextRequest(
        text=text,
        model=model,
        batch=batch,
        decoding=decoding,
        stream=stream,
        details=details,
        prompt_details=prompt_details,
        timings=parameters.get("timings", False),
        receipt=parameters.get("receipt", False),
        return_full_text=parameters.get("return_full_text", False),
        max_prompt_tokens=parameters.get("truncate", None),
        shows_prompt_logprobs="prompt_logprobs" in parameters,
        warnings=(*top_level.warnings, *parameters.warnings, *decoding.warnings),
    )


def _with_max_new_tokens(body: Mapping[str, object], top_level: Values) -> Mapping[str, object]:
    """Return the parameters with `max_new_tokens` from beside `inputs`."""
    if body.get("max_new_tokens") is not None:
        raise RequestError("max_new_tokens", "is given twice; send it in parameters")
    return {**body, "max_new_tokens": top_level.given["max_new_tokens"]}


def input_text(value: object, field: str = "inputs") -> str:
    """Return an input. Raises RequestError, naming `field`, unless it is a non-empty string."""
    if not isinstance(value, str) or not value:
        raise RequestError(field, f"expected a non-empty string, not {_describe(value)}")
    return value


def _batch(inputs: Sequence[object], top_level: Values) -> Batch:
    if not 0 < len(inputs) <= MAX_BATCH:
        raise RequestError("inputs", f"expected 1 to {MAX_BATCH} inputs, not {len(inputs)}")
    return Batch(inputs, read_models(top_level, len(inputs)))


def _describe(value: object) -> str:
    match value:
        case None:
            return "nothing"
        case str():
            return "an empty string"
        case list():
            return "a list"
        case dict():
            return "an object"
        case _:
            return "a number or a boolean"


def _check_combinations(parameters: Values, *, stream: bool, details: bool) -> None:
    """Raise RequestError for fields whose results the response cannot show."""
    if stream or not details:
        allowed, why = _IN_STREAM if stream else _WITHOUT_DETAILS
        for name, value in allowed.items():
            if parameters.get(name, value) != value:
                raise RequestError(f"parameters.{name}", why)


def _decoding(parameters: Values, *, returns_all: bool, prompt_details: bool) -> Decoding:
    """Read the sampling parameters.

    Decoding is greedy if do_sample is false, or if neither do_sample nor temperature is given.
    """
    sampled = parameters.get("do_sample", "temperature" in parameters)
    stop: str | list[str] = parameters.get("stop_sequences", [])
    optional: dict[str, int | None] = {}
    if not parameters.given.keys().isdisjoint(("n", "best_of")):
        optional = _n_and_best_of(parameters, returns_all=returns_all)
    scores_prompt = prompt_details and "prompt_logprobs" not in parameters
    decoding = read_decoding(
        parameters,
        _DIALECT_OF_DETAILS if scores_prompt else _DIALECT,
        max_tokens=parameters.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        temperature=parameters.get("temperature", 1.0) if sampled else 0.0,
        ignore_eos=parameters.get("ignore_eos_token", False),
        logprobs=parameters.get("top_n_tokens", 0) or None,
        prompt_logprobs=0 if scores_prompt else None,
        **optional,
    )
    if decoding.params.beam_width and parameters.get("do_sample", False):
        raise RequestError("parameters.do_sample", "cannot be combined with beam search")
    return decoding


def _n_and_best_of(parameters: Values, *, returns_all: bool) -> dict[str, int | None]:
    """Return `n` and `best_of` for SamplingParams, so that the most likely answer comes first.

    `n` alone therefore also sets `best_of`, which makes the engine rank the answers. `best_of`
    alone returns all answers if the response can show them (`returns_all`).
    """
    n: int | None = parameters.get("n", None)
    best_of: int | None = parameters.get("best_of", None)
    if n is None and returns_all:
        n = best_of
    if best_of is None and parameters.get("num_beams", 1) == 1:
        best_of = n
    return {"n": n, "best_of": best_of}
