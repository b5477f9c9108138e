"""The kinds of values that a field can hold: how each is checked, said and described."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeGuard, cast

Schema = Mapping[str, object]

_MAX_INTEGER = 2**63 - 1
_TOKEN_ID = re.compile("[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class Kind:
    """`expected` ends the sentence «expected ...»; `schema` is the same as JSON Schema."""

    expected: str
    holds: Callable[[object], bool]
    schema: Schema


def is_list(value: object) -> TypeGuard[list[object]]:
    return isinstance(value, list)


def is_integer(value: object) -> TypeGuard[int]:
    """A number of 64 bits, as all that crosses the wire must be."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MAX_INTEGER


def is_integers(value: object) -> TypeGuard[list[int]]:
    return is_list(value) and all(map(is_integer, value))


def is_texts(value: object) -> TypeGuard[list[str]]:
    return is_list(value) and all(isinstance(each, str) for each in value)


def _is_number(value: object) -> bool:
    return isinstance(value, float) or is_integer(value)


def _is_objects(value: object) -> bool:
    return is_list(value) and all(isinstance(each, dict) for each in value)


def _is_biases(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    biases = cast(dict[str, object], value)
    return all(_TOKEN_ID.fullmatch(key) and _is_number(bias) for key, bias in biases.items())


_INTEGER_SCHEMA = {"type": "integer", "minimum": -_MAX_INTEGER, "maximum": _MAX_INTEGER}
_TEXT_SCHEMA = {"type": "string"}
_TEXTS_SCHEMA = {"type": "array", "items": _TEXT_SCHEMA}

BOOLEAN = Kind("true or false", lambda value: isinstance(value, bool), {"type": "boolean"})
NUMBER = Kind("a number", _is_number, {"type": "number"})
INTEGER = Kind("an integer of at most 64 bits", is_integer, _INTEGER_SCHEMA)
INTEGERS = Kind("a list of integers", is_integers, {"type": "array", "items": _INTEGER_SCHEMA})
TEXT = Kind("a text", lambda value: isinstance(value, str), _TEXT_SCHEMA)
TEXTS = Kind("a list of texts", is_texts, _TEXTS_SCHEMA)
TEXT_OR_TEXTS = Kind(
    "a text or a list of texts",
    lambda value: isinstance(value, str) or is_texts(value),
    {"anyOf": [_TEXT_SCHEMA, _TEXTS_SCHEMA]},
)
OBJECT = Kind("an object", lambda value: isinstance(value, dict), {"type": "object"})
BIASES = Kind(
    "an object of token ids and numbers",
    _is_biases,
    {
        "type": "object",
        "propertyNames": {"pattern": f"^{_TOKEN_ID.pattern}$"},
        "additionalProperties": {"type": "number"},
    },
)
OBJECTS = Kind("a list of objects", _is_objects, {"type": "array", "items": {"type": "object"}})


def shaped(kind: Kind, schema: Schema) -> Kind:
    """The same with a closer description; what that says more is checked where it is read."""
    return replace(kind, schema={**kind.schema, **schema})


ANYTHING = Kind("anything", lambda _: True, {})
"""For fields whose form is checked where they are read."""
