"""Kinds of field values: the check, its error text and the JSON Schema of each."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard, cast

from core.errors import RequestError
from core.sampling import MAX_BIAS, MAX_INT64

Schema = Mapping[str, object]

TOO_LARGE = "an integer of more than 64 bits"
MAX_COUNT = 2**31 - 1
"""Bound of numbers that count tokens, texts or numbers of a vector. No model has more, and every
library can hold it."""
MAX_TOKEN_ID = 10**9 - 1
_TOKEN_ID = re.compile("(?:0|[1-9][0-9]{0,8})")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of value that a field can have."""

    expected: str
    """Completes the error message "expected ..."."""
    accepts: Callable[[object], bool]
    schema: Schema


def is_list(value: object) -> TypeGuard[list[object]]:
    return isinstance(value, list)


def is_integer(value: object) -> TypeGuard[int]:
    """Return whether the value is an integer that MessagePack can carry (64 bits)."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MAX_INT64


def check_integers(value: object, field: str) -> None:
    """Raise RequestError, naming its place, for an integer that MessagePack cannot carry."""
    match value:
        case int() if not is_integer(value) and not isinstance(value, bool):
            raise RequestError(field, f"is {TOO_LARGE}")
        case dict():
            for name, item in cast(Mapping[str, object], value).items():
                check_integers(item, f"{field}.{name}")
        case list() | tuple():
            for index, item in enumerate(cast(Sequence[object], value)):
                check_integers(item, f"{field}[{index}]")
        case _:
            pass


def is_integers(value: object) -> TypeGuard[list[int]]:
    return is_list(value) and all(map(is_integer, value))


def is_strings(value: object) -> TypeGuard[list[str]]:
    return is_list(value) and all(isinstance(item, str) for item in value)


def is_token_ids(value: object) -> TypeGuard[list[int]]:
    return is_integers(value) and all(0 <= token_id <= MAX_TOKEN_ID for token_id in value)


def _is_number(value: object) -> TypeGuard[float]:
    return (isinstance(value, float) and math.isfinite(value)) or is_integer(value)


def _is_objects(value: object) -> bool:
    return is_list(value) and all(isinstance(item, dict) for item in value)


def _is_biases(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    biases = cast(dict[str, object], value)
    return all(_TOKEN_ID.fullmatch(key) and _is_number(bias) for key, bias in biases.items())


def integer(least: float, greatest: float) -> Kind:
    """Return the kind of integers between two bounds."""
    return Kind(
        f"an integer from {least} to {greatest}",
        lambda value: is_integer(value) and least <= value <= greatest,
        {"type": "integer", "minimum": least, "maximum": greatest},
    )


def number(least: float, greatest: float) -> Kind:
    """Return the kind of finite numbers between two bounds."""
    return Kind(
        f"a number from {least} to {greatest}",
        lambda value: _is_number(value) and least <= value <= greatest,
        {"type": "number", "minimum": least, "maximum": greatest},
    )


def object_schema(properties: Schema, required: Sequence[str] | None = None) -> Schema:
    """Return the JSON Schema of an object. required: names of properties; None stands for all."""
    names = properties if required is None else required
    return {"type": "object", "properties": properties, "required": list(names)}


def content_schema(*parts: Schema) -> Schema:
    """Return the JSON Schema of a text, or a list of such parts."""
    return {"anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": list(parts)}}]}


_INTEGER_SCHEMA = {"type": "integer", "minimum": -MAX_INT64, "maximum": MAX_INT64}
_STRING_SCHEMA = {"type": "string"}
_STRINGS_SCHEMA = {"type": "array", "items": _STRING_SCHEMA}

BOOLEAN = Kind("true or false", lambda value: isinstance(value, bool), {"type": "boolean"})
NUMBER = Kind("a number", _is_number, {"type": "number"})
"""For fields that get their bounds from `with_schema`."""
INTEGER = Kind("an integer of at most 64 bits", is_integer, _INTEGER_SCHEMA)
"""As NUMBER."""
TOKEN_IDS = Kind(
    f"a list of token ids, which are from 0 to {MAX_TOKEN_ID}",
    is_token_ids,
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}},
)
STRING = Kind("a string", lambda value: isinstance(value, str), _STRING_SCHEMA)
STRINGS = Kind("a list of strings", is_strings, _STRINGS_SCHEMA)
STRING_OR_STRINGS = Kind(
    "a string or a list of strings",
    lambda value: isinstance(value, str) or is_strings(value),
    {"anyOf": [_STRING_SCHEMA, _STRINGS_SCHEMA]},
)
OBJECT = Kind("an object", lambda value: isinstance(value, dict), {"type": "object"})
BIASES = Kind(
    "an object that maps token ids to numbers",
    _is_biases,
    {
        "type": "object",
        "propertyNames": {"pattern": f"^{_TOKEN_ID.pattern}$"},
        "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
    },
)
OBJECTS = Kind("a list of objects", _is_objects, {"type": "array", "items": {"type": "object"}})


def with_schema(kind: Kind, schema: Schema) -> Kind:
    """Return the kind with more JSON Schema, which the code that reads the field must check."""
    return replace(kind, schema={**kind.schema, **schema})


ANYTHING = Kind("anything", lambda _: True, {})
"""For fields that are checked by the code that reads them."""
