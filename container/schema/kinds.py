"""Kinds of field values: the check, its error text and the JSON Schema of each."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard, cast

from core.errors import RequestError

Schema = Mapping[str, object]

TOO_LARGE = "an integer of more than 64 bits"
_MAX_INTEGER = 2**63 - 1
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
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MAX_INTEGER


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


def _is_number(value: object) -> bool:
    return isinstance(value, float) or is_integer(value)


def _is_objects(value: object) -> bool:
    return is_list(value) and all(isinstance(item, dict) for item in value)


def _is_biases(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    biases = cast(dict[str, object], value)
    return all(_TOKEN_ID.fullmatch(key) and _is_number(bias) for key, bias in biases.items())


_INTEGER_SCHEMA = {"type": "integer", "minimum": -_MAX_INTEGER, "maximum": _MAX_INTEGER}
_STRING_SCHEMA = {"type": "string"}
_STRINGS_SCHEMA = {"type": "array", "items": _STRING_SCHEMA}

BOOLEAN = Kind("true or false", lambda value: isinstance(value, bool), {"type": "boolean"})
NUMBER = Kind("a number", _is_number, {"type": "number"})
INTEGER = Kind("an integer of at most 64 bits", is_integer, _INTEGER_SCHEMA)
INTEGERS = Kind("a list of integers", is_integers, {"type": "array", "items": _INTEGER_SCHEMA})
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
        "additionalProperties": {"type": "number"},
    },
)
OBJECTS = Kind("a list of objects", _is_objects, {"type": "array", "items": {"type": "object"}})


def with_schema(kind: Kind, schema: Schema) -> Kind:
    """Return the kind with more JSON Schema, which the code that reads the field must check."""
    return replace(kind, schema={**kind.schema, **schema})


ANYTHING = Kind("anything", lambda _: True, {})
"""For fields that are checked by the code that reads them."""
