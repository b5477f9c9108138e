"""OpenAI's embeddings, and `inputs` of LMI and text-embeddings-inference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from container.apis.completions.schema import PROMPT
from container.schema.fields import Field, Fields, Values, ignored, read_fields
from container.schema.kinds import BOOLEAN, INTEGER, OBJECT, TEXT, is_integers, shaped
from core.errors import RequestError
from core.task_bodies import EmbeddingBody

MAX_INPUTS = 2048
"""OpenAI's own limit."""
MAX_TOKENS = 2**31 - 1
"""Of a text that is cut to what the model takes."""

_FORMATS = ("float", "base64")

EMBEDDING_FIELDS: Fields = {
    "input": Field(PROMPT, "The text, or several: as texts or as token ids."),
    "encoding_format": Field(
        shaped(TEXT, {"enum": [*_FORMATS]}),
        "float: numbers (default); base64: little-endian fp32.",
    ),
    "dimensions": Field(
        INTEGER, "Keep so many numbers of each vector, where the model was trained for it."
    ),
    "truncate_prompt_tokens": Field(
        INTEGER, "Cut texts after so many tokens; -1: after as many as the model takes."
    ),
    "model": ignored("One model is served, whatever its name here."),
    "user": ignored(),
}
_PARAMETERS: Fields = {
    "truncate": Field(BOOLEAN, "Cut texts after as many tokens as the model takes."),
}
INPUTS_FIELDS: Fields = {
    "inputs": Field(PROMPT, "The text, or several: as texts or as token ids."),
    "truncate": Field(BOOLEAN, "As `parameters.truncate`."),
    "parameters": Field(OBJECT, "`truncate`: cut texts after as many tokens as the model takes."),
    "model": ignored("One model is served."),
}


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """A checked request."""

    body: EmbeddingBody
    is_base64: bool
    warnings: tuple[str, ...]


def read_embedding_request(body: Mapping[str, object]) -> EmbeddingRequest:
    """OpenAI's. Raises RequestError that names the first mistake."""
    values = read_fields(body, EMBEDDING_FIELDS)
    form = values.get("encoding_format", "float")
    if form not in _FORMATS:
        raise RequestError("encoding_format", f"expected one of {', '.join(_FORMATS)}")
    read = EmbeddingBody(
        inputs=_inputs(values, "input"),
        field="input",
        max_tokens=_cut(values),
        dimensions=_positive(values, "dimensions"),
    )
    return EmbeddingRequest(read, form == "base64", values.warnings)


def read_inputs_request(body: Mapping[str, object]) -> EmbeddingRequest:
    """LMI's. Raises RequestError that names the first mistake."""
    values = read_fields(body, INPUTS_FIELDS)
    given: Mapping[str, object] = values.get("parameters", {})
    parameters = read_fields(given, _PARAMETERS, "parameters.")
    is_cut = values.get("truncate", parameters.get("truncate", False))
    read = EmbeddingBody(_inputs(values, "inputs"), "inputs", MAX_TOKENS if is_cut else None)
    return EmbeddingRequest(read, False, values.warnings)


def _inputs(values: Values, field: str) -> list[str | list[int]]:
    given = cast(object, values.get(field, ""))
    if isinstance(given, str) or is_integers(given):
        inputs: list[str | list[int]] = [given]
    else:
        inputs = cast(list[str | list[int]], given)
    if not inputs or not all(inputs):
        raise RequestError(field, "expected a text, or token ids, that are not empty")
    if len(inputs) > MAX_INPUTS:
        raise RequestError(field, f"at most {MAX_INPUTS} texts in a request")
    return inputs


def _cut(values: Values) -> int | None:
    return MAX_TOKENS if values.get("truncate_prompt_tokens", 0) == -1 else _positive(
        values, "truncate_prompt_tokens"
    )  # fmt: skip


def _positive(values: Values, field: str) -> int | None:
    number: int | None = values.get(field, None)
    if number is not None and number < 1:
        raise RequestError(field, "must be at least 1")
    return number
