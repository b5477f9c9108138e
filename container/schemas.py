"""LMI's text schema, checked strictly: every mistake is named as the client spelt it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeGuard, cast

import msgspec

from core.errors import RequestError
from core.sampling import SamplingParams
from core.suggest import did_you_mean

DEFAULT_MAX_NEW_TOKENS = 30
MAX_STOP_TEXTS = 16
MAX_STOP_CHARACTERS = 1000
_MAX_INTEGER = 2**63 - 1

Kind = Literal["boolean", "number", "integer", "texts", "integers"]

_PARAMETERS: Mapping[str, Kind] = {
    "do_sample": "boolean",
    "temperature": "number",
    "top_k": "integer",
    "top_p": "number",
    "repetition_penalty": "number",
    "max_new_tokens": "integer",
    "seed": "integer",
    "stop_sequences": "texts",
    "stop": "texts",
    "stop_token_ids": "integers",
    "ignore_eos_token": "boolean",
    "ignore_eos": "boolean",
    "details": "boolean",
    "return_full_text": "boolean",
    "skip_special_tokens": "boolean",
    "stream": "boolean",
}
_EXPECTED: Mapping[Kind, str] = {
    "boolean": "true or false",
    "number": "a number",
    "integer": "an integer of at most 64 bits",
    "texts": "a list of texts",
    "integers": "a list of integers",
}
_ALIASES = {"stop": "stop_sequences", "ignore_eos": "ignore_eos_token"}
_PARAMETER_OF_SAMPLING = {
    "max_tokens": "max_new_tokens",
    "ignore_eos": "ignore_eos_token",
    "stop": "stop_sequences",
}
_TOP_LEVEL = ("inputs", "parameters", "stream")
_JSON_TYPES = ("", "application/json", "application/x-www-form-urlencoded")
"""Without a type a body is JSON; the third is what `curl -d` says of whatever it sends."""


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A checked request. `params.stop` is for the front end, which alone sees text."""

    inputs: str
    params: SamplingParams
    stream: bool
    details: bool
    return_full_text: bool
    skip_special_tokens: bool


def is_served_type(content_type: str) -> bool:
    """Whether a body of this Content-Type can be read."""
    return content_type in (*_JSON_TYPES, "text/plain") or content_type.endswith("+json")


def parse_request(body: bytes, content_type: str) -> TextRequest:
    """Reads a body of a served type. Raises RequestError that names the first mistake."""
    if content_type == "text/plain":
        return _request({"inputs": _decoded(body)})
    return _request(_json_object(body))


def parameter_error(error: RequestError) -> RequestError:
    """The same error in the request's own words, not those of SamplingParams."""
    if error.field == "prompt":
        return RequestError("inputs", error.message)
    name = _PARAMETER_OF_SAMPLING.get(error.field, error.field)
    return RequestError(f"parameters.{name}", error.message)


def _decoded(body: bytes) -> str:
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError("body", f"byte {error.start} is not UTF-8") from None


def _json_object(body: bytes) -> dict[str, object]:
    _decoded(body)
    if not body.strip():
        raise RequestError("body", 'is empty; send {"inputs": "..."}')
    try:
        value: object = msgspec.json.decode(body)
    except RecursionError:
        raise RequestError("body", "is nested too deeply") from None
    except ValueError as error:
        raise RequestError("body", f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError("body", 'expected a JSON object such as {"inputs": "..."}')
    return cast(dict[str, object], value)


def _request(body: dict[str, object]) -> TextRequest:
    if "messages" in body:
        raise RequestError("messages", "chat is not served by this version; send 'inputs'")
    _reject_unknown(body, _TOP_LEVEL, "")
    inputs = body.get("inputs")
    if not isinstance(inputs, str) or not inputs:
        raise RequestError("inputs", f"expected one text that is not empty, not {_named(inputs)}")
    parameters = _parameters(body.get("parameters"))
    stream = body.get("stream")
    if stream is not None:
        _check_type("stream", stream, "boolean")
    return TextRequest(
        inputs=inputs,
        params=_sampling(parameters),
        stream=bool(parameters.get("stream") if stream is None else stream),
        details=bool(parameters.get("details")),
        return_full_text=bool(parameters.get("return_full_text")),
        skip_special_tokens=bool(parameters.get("skip_special_tokens", True)),
    )


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


def _parameters(given: object) -> dict[str, object]:
    """The parameters of right types under their first names; null means not given."""
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise RequestError("parameters", "expected an object")
    parameters: dict[str, object] = {}
    named = cast(dict[str, object], given)
    _reject_unknown(named, _PARAMETERS, "parameters.")
    for name, value in named.items():
        if value is None:
            continue
        _check_type(f"parameters.{name}", value, _PARAMETERS[name])
        first_name = _ALIASES.get(name, name)
        if first_name in parameters:
            raise RequestError(f"parameters.{name}", "is given twice, under two names")
        parameters[first_name] = value
    _check_stop_texts(cast(list[str], parameters.get("stop_sequences", [])))
    return parameters


def _reject_unknown(given: Iterable[str], known: Iterable[str], prefix: str) -> None:
    for name in given:
        if name not in known:
            raise RequestError(f"{prefix}{name}", f"no such field{did_you_mean(name, known)}")


def _check_type(field: str, value: object, kind: Kind) -> None:
    if not _has_type(value, kind):
        raise RequestError(field, f"expected {_EXPECTED[kind]}")


def _has_type(value: object, kind: Kind) -> bool:
    match kind:
        case "boolean":
            return isinstance(value, bool)
        case "number":
            return isinstance(value, float) or _is_integer(value)
        case "integer":
            return _is_integer(value)
        case "texts":
            return _is_list(value) and all(isinstance(each, str) for each in value)
        case "integers":
            return _is_list(value) and all(map(_is_integer, value))


def _is_integer(value: object) -> bool:
    """A number of 64 bits, as all that crosses the wire must be."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MAX_INTEGER


def _is_list(value: object) -> TypeGuard[list[object]]:
    return isinstance(value, list)


def _check_stop_texts(texts: list[str]) -> None:
    if len(texts) > MAX_STOP_TEXTS:
        raise RequestError("parameters.stop_sequences", f"at most {MAX_STOP_TEXTS} texts")
    if any(len(text) > MAX_STOP_CHARACTERS for text in texts):
        raise RequestError(
            "parameters.stop_sequences", f"at most {MAX_STOP_CHARACTERS} characters in a text"
        )


def _sampling(parameters: Mapping[str, object]) -> SamplingParams:
    """Greedy unless a temperature is given or do_sample is true; do_sample=false is greedy."""
    sampled = parameters.get("do_sample", "temperature" in parameters)
    values = {
        "temperature": parameters.get("temperature", 1.0) if sampled else 0.0,
        "max_tokens": parameters.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS),
        "stop": tuple(cast(list[str], parameters.get("stop_sequences", ()))),
        "stop_token_ids": tuple(cast(list[int], parameters.get("stop_token_ids", ()))),
        "ignore_eos": parameters.get("ignore_eos_token", False),
    }
    same_name = ("top_k", "top_p", "repetition_penalty", "seed")
    values |= {name: parameters[name] for name in same_name if name in parameters}
    try:
        return msgspec.convert(values, SamplingParams)
    except RequestError as error:
        raise parameter_error(error) from None
