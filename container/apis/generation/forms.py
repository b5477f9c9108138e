"""What an answer must look like, in all the words in which clients say it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from container.schema.fields import Field, Fields, Values, ignored, read_fields, unserved
from container.schema.kinds import ANYTHING, BOOLEAN, OBJECT, TEXT, TEXTS, Kind, shaped
from core.errors import RequestError
from core.structured_outputs import StructuredOutputsParams

_JSON_SCHEMA = Kind(
    "a JSON Schema: an object, or the text of one",
    lambda value: isinstance(value, dict | str),
    {"anyOf": [{"type": "object"}, {"type": "string"}]},
)
_OF_STRUCTURED_OUTPUTS: Fields = {
    "json": Field(_JSON_SCHEMA, "The answer is JSON of this schema."),
    "json_object": Field(BOOLEAN, "The answer is any JSON object."),
    "regex": Field(TEXT, "All of the answer matches this regular expression."),
    "choice": Field(TEXTS, "The answer is one of these texts."),
    "grammar": Field(TEXT, "The answer follows this grammar, in Lark's notation or GBNF."),
    "disable_any_whitespace": unserved(BOOLEAN, False),
    "disable_additional_properties": unserved(
        BOOLEAN, False, instead="say additionalProperties in the schema"
    ),
    "whitespace_pattern": unserved(TEXT),
    "structural_tag": unserved(ANYTHING),
}
_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice",
           "guided_grammar": "grammar"}  # fmt: skip
"""vLLM's older names."""
_TYPES = {"type": {"enum": ["text", "json_object", "json_schema"]}}
_RESPONSE_FORMAT = shaped(OBJECT, {"properties": _TYPES, "required": ["type"]})
_TGI_GRAMMAR = shaped(
    OBJECT,
    {
        "properties": {"type": {"enum": ["json", "json_schema", "regex"]}, "value": {}},
        "required": ["type", "value"],
    },
)

FORM_FIELDS: Fields = {
    "structured_outputs": Field(
        shaped(
            OBJECT, {"properties": {n: f.kind.schema for n, f in _OF_STRUCTURED_OUTPUTS.items()}}
        ),
        "What the answer must look like: json, json_object, regex, choice or grammar.",
    ),
    **{
        name: Field(_OF_STRUCTURED_OUTPUTS[form].kind, f"As `structured_outputs.{form}`.")
        for name, form in _GUIDED.items()
    },
    "guided_decoding_backend": ignored("There is one: llguidance."),
}
RESPONSE_FORMAT = Field(
    _RESPONSE_FORMAT, "text; json_object, so that the answer is one; json_schema, one of a schema."
)
TGI_GRAMMAR = Field(_TGI_GRAMMAR, "json with a schema or regex as its value: the answer is that.")


@dataclass(frozen=True, slots=True)
class Form:
    """What an answer must look like, and the field that says so."""

    field: str
    params: StructuredOutputsParams


def read_form(values: Values, prefix: str) -> Form | None:
    """Of any API's fields. Raises RequestError that names the first mistake.

    prefix: what stands before the fields' names in errors, though not in `Form.field`.
    """
    given = [*_given(values, prefix)]
    if len(given) > 1:
        raise RequestError(prefix + given[1][0], f"does not go with {given[0][0]}")
    for field, form, value in given:
        try:
            params = msgspec.convert({form: _plain(value)}, StructuredOutputsParams)
        except RequestError as error:
            raise RequestError(prefix + field, error.message) from None
        return Form(field, params)
    return None


_Given = tuple[str, str, object]
"""A field, the field of StructuredOutputsParams that it stands for, and its value."""


def _given(values: Values, prefix: str) -> Iterator[_Given]:
    for name, form in _GUIDED.items():
        if name in values:
            yield name, form, values.given[name]
    nested: Mapping[str, object] = values.get("structured_outputs", {})
    own = read_fields(nested, _OF_STRUCTURED_OUTPUTS, f"{prefix}structured_outputs.")
    for form, value in own.given.items():
        if value is not False:
            yield f"structured_outputs.{form}", form, value
    if "response_format" in values:
        yield from _response_format(values.get("response_format", {}))
    if "grammar" in values:
        yield from _tgi_grammar(values.get("grammar", {}), f"{prefix}grammar")


def _response_format(format: Mapping[str, Any]) -> Iterator[_Given]:
    """OpenAI's."""
    match format:
        case {"type": "text"}:
            return
        case {"type": "json_object"}:
            yield "response_format", "json_object", True
        case {"type": "json_schema", "json_schema": {"schema": dict()}}:
            yield "response_format.json_schema.schema", "json", format["json_schema"]["schema"]
        case {"type": "json_schema"}:
            raise RequestError("response_format.json_schema", "expected an object with a schema")
        case _:
            raise RequestError("response_format.type", "expected text, json_object or json_schema")


def _tgi_grammar(grammar: Mapping[str, Any], field: str) -> Iterator[_Given]:
    """text-generation-inference's; `json` has a schema as its value, `json_schema` names it too."""
    match grammar:
        case {"type": "json", "value": dict() | str()}:
            yield "grammar.value", "json", grammar["value"]
        case {"type": "json_schema", "value": {"schema": dict() | str()}}:
            yield "grammar.value.schema", "json", grammar["value"]["schema"]
        case {"type": "regex", "value": str(regex)}:
            yield "grammar.value", "regex", regex
        case {"type": "json" | "json_schema" | "regex"}:
            raise RequestError(f"{field}.value", "expected a JSON Schema, or a regular expression")
        case _:
            raise RequestError(f"{field}.type", "expected json, json_schema or regex")


def _plain(value: object) -> object:
    """A schema as its text. Raises RequestError where that is nested too deeply."""
    if not isinstance(value, dict):
        return value
    try:
        return msgspec.json.encode(cast(dict[str, object], value)).decode()
    except RecursionError:
        raise RequestError("json", "is nested too deeply") from None
