"""Tables of the request fields that an API supports, rejects or ignores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass
from typing import Literal, TypeVar, cast

from container.schema.kinds import ANYTHING, Kind
from core.configuration.limits import Limit
from core.configuration.suggest import did_you_mean
from core.errors import RequestError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Field:
    """A field that an API recognizes; request checks and the OpenAPI document are built from it."""

    kind: Kind
    doc: str
    effect: Literal["supported", "unsupported", "ignored"] = "supported"
    neutral: tuple[object, ...] = ()
    """Values of an unsupported field that are accepted because they ask for nothing special."""
    canonical_name: str | None = None
    """For an alias, the name of the field it stands for."""
    limit: Limit | None = None
    """The most entries that a list or object may have. They are counted before they are checked."""


Fields = Mapping[str, Field]


def alias(canonical_name: str, fields: Fields) -> Field:
    """Return a field that is another name for `canonical_name` in `fields`."""
    original = fields[canonical_name]
    doc = f"The same as `{canonical_name}`."
    return Field(original.kind, doc, canonical_name=canonical_name, limit=original.limit)


def unsupported(kind: Kind, *neutral: object, instead: str = "leave it out") -> Field:
    """Return a field of other servers that is rejected here unless its value is in `neutral`."""
    return Field(kind, f"Not supported by this version; {instead}.", "unsupported", neutral)


def ignored(why: str = "Has no effect here and is ignored.") -> Field:
    """Return a field of other servers that is accepted and changes nothing here."""
    return Field(ANYTHING, why, "ignored")


MODEL_IGNORED = ignored("Only one model is served, whatever name is sent.")


@dataclass(frozen=True, slots=True)
class Values:
    """The supported fields of a request, by canonical name; fields that are null are left out."""

    given: Mapping[str, object]
    warnings: tuple[str, ...]
    """One sentence for each ignored field."""

    def get(self, name: str, default: T) -> T:
        """Return the field's value, whose type `read_fields` has checked, or `default`."""
        return cast(T, self.given.get(name, default))

    def __contains__(self, name: str) -> bool:
        return name in self.given


def read_fields(body: Mapping[str, object], fields: Fields, prefix: str = "") -> Values:
    """Check the names and types of the fields in `body`.

    A field that is null is not set, whatever its name: clients send null for unused fields.
    Raises RequestError for the first unknown, duplicate, malformed or unsupported field; `prefix`
    precedes its name in the message.
    """
    values: dict[str, object] = {}
    given = {name: value for name, value in body.items() if value is not None}
    _reject_unknown(given, fields, prefix)
    for name, value in given.items():
        field = fields[name]
        _check(f"{prefix}{name}", value, field)
        canonical_name = field.canonical_name or name
        if canonical_name in values:
            raise RequestError(f"{prefix}{name}", "is given twice, under two names")
        if field.effect == "supported":
            values[canonical_name] = value
    ignored = (name for name in given if fields[name].effect == "ignored")
    return Values(values, tuple(f"{prefix}{name} has no effect here" for name in ignored))


def _reject_unknown(body: Iterable[str], fields: Fields, prefix: str) -> None:
    for name in body:
        if name not in fields:
            raise RequestError(f"{prefix}{name}", f"no such field{did_you_mean(name, fields)}")


def _check(name: str, value: object, field: Field) -> None:
    if field.limit is not None and isinstance(value, Sized) and not isinstance(value, str):
        field.limit.check(name, len(value))
    if not field.kind.accepts(value):
        raise RequestError(name, f"expected {field.kind.expected}")
    if field.effect == "unsupported" and value not in field.neutral:
        raise RequestError(name, field.doc[0].lower() + field.doc[1:].rstrip("."))
