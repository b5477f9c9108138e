"""Structured outputs: every request field that constrains the format of an answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from container.schema.fields import Field, Fields, Values, ignored, read_fields, unsupported
from container.schema.kinds import ANYTHING, BOOLEAN, OBJECT, STRING, STRINGS, Kind, with_schema
from core.errors import RequestError
from core.structured_outputs import StructuredOutputsParams

_JSON_SCHEMA = Kind(
    "a JSON Schema, as an object or as a string",
    lambda value: isinstance(value, dict | str),
    {"anyOf": [{"type": "object"}, {"type": "string"}]},
)
_STRUCTURED_OUTPUTS: Fields = {
    "json": Field(_JSON_SCHEMA, "The answer is JSON of this schema."),
    "json_object": Field(BOOLEAN, "The answer is any JSON object."),
    "regex": Field(STRING, "The whole answer matches this regular expression."),
    "choice": Field(STRINGS, "The answer is one of these strings."),
    "grammar": Field(STRING, "The answer follows this grammar, in Lark or GBNF syntax."),
    "disable_any_whitespace": unsupported(BOOLEAN, False),
    "disable_additional_properties": unsupported(
        BOOLEAN, False, instead="set additionalProperties in the schema"
    ),
    "whitespace_pattern": unsupported(STRING),
    "structural_tag": unsupported(ANYTHING),
}
_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice",
           "guided_grammar": "grammar"}  # fmt: skip
"""vLLM's older fields, with the field of `structured_outputs` that each stands for."""
_FORMS: Mapping[str, tuple[str, ...]] = {
    "text": (),
    "json_object": ("schema", "value"),
    "json_schema": ("json_schema", "value"),
    "json": ("value",),
    "regex": ("value",),
}
"""The fields that each type of `response_format` allows. A request has at most one of them. `value`
is a field of text-generation-inference. llama.cpp and hosted APIs have `json_object` with a
`schema`."""
_RESPONSE_FORMAT = with_schema(
    OBJECT,
    {
        "anyOf": [
            {
                "properties": {"type": {"const": kind}, **{name: {} for name in names}},
                "required": ["type"],
                "additionalProperties": {"type": "null"},
            }
            for kind, names in _FORMS.items()
        ]
    },
)
_TGI_GRAMMAR = with_schema(
    OBJECT,
    {
        "properties": {
            "type": {"enum": ["json", "json_object", "json_schema", "regex"]},
            "value": {},
        },
        "required": ["type", "value"],
    },
)

STRUCTURED_OUTPUT_FIELDS: Fields = {
    "structured_outputs": Field(
        with_schema(
            OBJECT, {"properties": {n: f.kind.schema for n, f in _STRUCTURED_OUTPUTS.items()}}
        ),
        "The format of the answer: json, json_object, regex, choice or grammar.",
    ),
    **{
        name: Field(_STRUCTURED_OUTPUTS[form].kind, f"The same as `structured_outputs.{form}`.")
        for name, form in _GUIDED.items()
    },
    "guided_decoding_backend": ignored("The only backend is llguidance."),
}
FORMAT_FIELDS = (*_GUIDED, "structured_outputs", "response_format", "grammar")
"""The fields that set a format, for `read_structured_outputs`."""
RESPONSE_FORMAT = Field(
    _RESPONSE_FORMAT,
    "text: any text. json_object: a JSON object or, if there is a `schema`, JSON of this schema. "
    "json_schema: JSON of the given schema. json and regex with a `value` are the types of "
    "text-generation-inference's `grammar`.",
)
TGI_GRAMMAR = Field(
    _TGI_GRAMMAR,
    "json: the answer is JSON of the schema in `value`. regex: it matches the regex in `value`.",
)


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """The format of an answer and the request field that sets it."""

    field: str
    params: StructuredOutputsParams


def read_structured_outputs(values: Values, prefix: str) -> StructuredOutputs | None:
    """Return the structured outputs that the request asks for; None if it asks for none.

    `prefix` precedes field names in error messages but not in `StructuredOutputs.field`. Raises
    RequestError that names the first bad field, or a second field that sets a format.
    """
    given = [*_format_fields(values, prefix)]
    return _structured_outputs(prefix, *given) if given else None


def _structured_outputs(
    prefix: str, first: _FormatField, *others: _FormatField
) -> StructuredOutputs:
    field, form, value = first
    if others:
        raise RequestError(prefix + others[0][0], f"cannot be combined with {field}")
    try:
        params = msgspec.convert({form: _schema_as_text(value)}, StructuredOutputsParams)
    except RequestError as error:
        raise RequestError(prefix + field, error.message) from None
    return StructuredOutputs(field, params)


def read_format(
    format: Mapping[str, Any], field: str, types: Sequence[str]
) -> StructuredOutputsParams | None:
    """Return the format in a `field` that holds a type and its schema side by side.

    None for the type text. Raises RequestError if the type is not json_schema or one of `types`.
    """
    match format:
        case {"type": "text"} if "text" in types:
            return None
        case {"type": "json_object"} if "json_object" in types:
            return StructuredOutputsParams(json_object=True)
        case {"type": "json_schema", "schema": dict()}:
            return StructuredOutputsParams(json=msgspec.json.encode(format["schema"]).decode())
        case _:
            kinds = " or ".join(filter(None, (", ".join(types), "json_schema")))
            raise RequestError(field, f"expected the type {kinds} with a schema")


_FormatField = tuple[str, str, object]
"""A request field, the field of StructuredOutputsParams that it stands for, and its value."""


def _format_fields(values: Values, prefix: str) -> Iterator[_FormatField]:
    for name, form in _GUIDED.items():
        if name in values:
            yield name, form, values.given[name]
    nested: Mapping[str, object] = values.get("structured_outputs", {})
    fields = read_fields(nested, _STRUCTURED_OUTPUTS, f"{prefix}structured_outputs.")
    for form, value in fields.given.items():
        if value is not False:
            yield f"structured_outputs.{form}", form, value
    if "response_format" in values:
        yield from _response_format(values.get("response_format", {}))
    if "grammar" in values:
        yield from _tgi_grammar(values.get("grammar", {}), "grammar", prefix)


def _response_format(format: Mapping[str, Any]) -> Iterator[_FormatField]:
    """Read `response_format`: OpenAI's, or text-generation-inference's with `value`.

    A field that does not belong to the `type` is an error, because it may hold the schema.
    """
    kind = format.get("type")
    if not isinstance(kind, str) or kind not in _FORMS:
        raise RequestError("response_format.type", f"expected one of {', '.join(_FORMS)}")
    given = {name: value for name, value in format.items() if value is not None}
    known = [name for name in _FORMS[kind] if name in given][:1]
    for name in given.keys() - {"type", *known}:
        takes = " or ".join(_FORMS[kind]) or "no other field"
        raise RequestError(f"response_format.{name}", f"type {kind} takes {takes}")
    match given:
        case {"value": _} | {"type": "json" | "regex"}:
            yield from _tgi_grammar(given, "response_format")
        case {"type": "text"}:
            return
        case {"type": "json_object", "schema": dict() | str()}:
            yield "response_format.schema", "json", given["schema"]
        case {"type": "json_object"} if "schema" not in given:
            yield "response_format", "json_object", True
        case {"type": "json_schema", "json_schema": {"schema": dict()}}:
            yield "response_format.json_schema.schema", "json", given["json_schema"]["schema"]
        case _:
            field = "schema" if kind == "json_object" else kind
            raise RequestError(f"response_format.{field}", "expected an object with a schema")


def _tgi_grammar(
    grammar: Mapping[str, Any], field: str, prefix: str = ""
) -> Iterator[_FormatField]:
    """Read text-generation-inference's grammar from `field`.

    The value is a schema for `json` and `json_object`, and an object with `schema` for
    `json_schema`.
    """
    match grammar:
        case {"type": "json" | "json_object", "value": dict() | str()}:
            yield f"{field}.value", "json", grammar["value"]
        case {"type": "json_schema", "value": {"schema": dict() | str()}}:
            yield f"{field}.value.schema", "json", grammar["value"]["schema"]
        case {"type": "regex", "value": str(regex)}:
            yield f"{field}.value", "regex", regex
        case {"type": "json" | "json_object" | "json_schema" | "regex"}:
            raise RequestError(
                f"{prefix}{field}.value", "expected a JSON Schema or a regular expression"
            )
        case _:
            raise RequestError(f"{prefix}{field}.type", "expected json, json_schema or regex")


def _schema_as_text(value: object) -> object:
    """Encode a schema as JSON; keep other values. Raises RequestError if nested too deeply."""
    if not isinstance(value, dict):
        return value
    try:
        return msgspec.json.encode(cast(dict[str, object], value)).decode()
    except RecursionError:
        raise RequestError("json", "is nested too deeply") from None
