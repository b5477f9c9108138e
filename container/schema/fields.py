"""Tables of fields: what an API takes, what it refuses, and what it passes over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar, cast

from container.schema.kinds import ANYTHING, Kind
from core.errors import RequestError
from core.suggest import did_you_mean

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Field:
    """A field that an API knows; the tables below and the OpenAPI document are made of these."""

    kind: Kind
    doc: str
    effect: Literal["served", "unserved", "ignored"] = "served"
    neutral: tuple[object, ...] = ()
    """Values of an unserved field that ask for nothing, so that they are accepted."""
    first_name: str | None = None
    """For an alias, the field it stands for."""


Fields = Mapping[str, Field]


def alias(first_name: str, fields: Fields) -> Field:
    """Another name for a field of that table."""
    original = fields[first_name]
    return Field(original.kind, f"The same as `{first_name}`.", first_name=first_name)


def unserved(kind: Kind, *neutral: object, instead: str = "leave it out") -> Field:
    """A field that others know and that is refused here, except where it asks for nothing."""
    return Field(kind, f"Not served by this version; {instead}.", "unserved", neutral)


def ignored(why: str = "Means nothing here, and is passed over.") -> Field:
    """A field that others know and that changes no answer here."""
    return Field(ANYTHING, why, "ignored")


@dataclass(frozen=True, slots=True)
class Values:
    """The served fields that were given, under their first names; null means not given."""

    given: Mapping[str, object]
    warnings: tuple[str, ...]
    """What was passed over, a sentence each."""

    def get(self, name: str, default: T) -> T:
        """The value, of the type that the field's kind promises."""
        return cast(T, self.given.get(name, default))

    def __contains__(self, name: str) -> bool:
        return name in self.given


def read_fields(body: Mapping[str, object], fields: Fields, prefix: str = "") -> Values:
    """Checks names and types. Raises RequestError that names the first mistake."""
    values: dict[str, object] = {}
    warnings: list[str] = []
    _reject_unknown(body, fields, prefix)
    for name, value in body.items():
        if value is None:
            continue
        field = fields[name]
        if field.effect == "ignored":
            warnings.append(f"{prefix}{name} has no effect here")
            continue
        _check(f"{prefix}{name}", value, field)
        first_name = field.first_name or name
        if first_name in values:
            raise RequestError(f"{prefix}{name}", "is given twice, under two names")
        if field.effect == "served":
            values[first_name] = value
    return Values(values, tuple(warnings))


def _reject_unknown(body: Iterable[str], fields: Fields, prefix: str) -> None:
    for name in body:
        if name not in fields:
            raise RequestError(f"{prefix}{name}", f"no such field{did_you_mean(name, fields)}")


def _check(name: str, value: object, field: Field) -> None:
    if not field.kind.holds(value):
        raise RequestError(name, f"expected {field.kind.expected}")
    if field.effect == "unserved" and value not in field.neutral:
        raise RequestError(name, field.doc[0].lower() + field.doc[1:].rstrip("."))
