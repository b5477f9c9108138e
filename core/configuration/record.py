"""A record of options that have one owner, and the row of the table that describes each."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import ClassVar, Literal, NamedTuple, TypeVar

from core.configuration.suggest import did_you_mean
from core.errors import ConfigurationError

T = TypeVar("T")
Value = str | int | float | bool | None


def option(
    default: T,
    doc: str,
    *,
    key: str | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    vllm: str | None = None,
) -> T:
    """Return a dataclass field with its documentation.

    key: None stands for `option.<name>`. vllm: vLLM's name of the option, if it has another one.
    """
    metadata = {"doc": doc, "key": key, "minimum": minimum, "maximum": maximum, "vllm": vllm}
    return field(default=default, metadata=metadata)


class Reserved(NamedTuple):
    """Device memory that an option reserves beside the weights."""

    what: str
    key: str
    """The option's."""
    num_elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Options with one owner. Every field is made by `option`.

    The constructor raises ConfigurationError if a value is out of range.
    """

    kinds: ClassVar[tuple[str, ...]] = ("generation",)
    """The kinds of models, or the tasks, for which `restricted` works."""

    def __post_init__(self) -> None:
        for row in rows_of(type(self)).values():
            row.check(getattr(self, row.name))

    @property
    def restricted(self) -> str:
        """A setting that works only for models of `kinds`, if the record has one; else ''."""
        return ""

    def reserved(self, linear_width: int) -> Reserved | None:
        """Return the device memory that the record reserves beside the weights.

        linear_width: inputs and outputs of all linear layers, added up.
        """
        return None


@dataclass(frozen=True, slots=True)
class Option:
    """One row of the table: a field of a record."""

    name: str
    key: str
    kind: type[str] | type[int] | type[float] | type[bool]
    values: tuple[str, ...]
    optional: bool
    default: Value
    minimum: float | None
    maximum: float | None
    doc: str
    vllm: str | None

    @property
    def kind_text(self) -> str:
        """The type as text for users: the allowed values if they are listed."""
        names = {str: "text", int: "integer", float: "number", bool: "true, false"}
        return ", ".join(self.values) if self.values else names[self.kind]

    def parse(self, text: str) -> Value:
        """Convert the text of a properties file or an environment variable to a value.

        An empty text is None if the option allows that. Raises ConfigurationError for a text that
        cannot be converted.
        """
        stripped = text.strip()
        if not stripped and self.optional:
            return None
        if self.kind is bool:
            return self._parse_bool(stripped)
        try:
            return self.kind(stripped)
        except ValueError:
            raise ConfigurationError(
                f"{self.key}={text}: expected {_article(self.kind_text)}"
            ) from None

    def check(self, value: object) -> None:
        """Raise ConfigurationError if `value` has the wrong type or is out of range."""
        if value is None and self.optional:
            return
        accepted = (int, float) if self.kind is float else (self.kind,)
        if not isinstance(value, accepted) or (isinstance(value, bool) and self.kind is not bool):
            raise ConfigurationError(f"{self.key}={value}: expected {_article(self.kind_text)}")
        if self.values and value not in self.values:
            raise ConfigurationError(
                f"{self.key}={value}: expected one of {', '.join(self.values)}"
                f"{did_you_mean(str(value), self.values)}"
            )
        if isinstance(value, int | float):
            self._check_range(value)

    def _parse_bool(self, text: str) -> bool:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise ConfigurationError(f"{self.key}={text}: expected true or false")

    def _check_range(self, value: float) -> None:
        if self.minimum is not None and not value >= self.minimum:
            raise ConfigurationError(f"{self.key}={value}: must be at least {self.minimum}")
        if self.maximum is not None and not value <= self.maximum:
            raise ConfigurationError(f"{self.key}={value}: must be at most {self.maximum}")


@cache
def rows_of(record: type[Record]) -> Mapping[str, Option]:
    """Return the rows of a record by name, in the order of its fields."""
    hints = typing.get_type_hints(record)
    return {item.name: _row(item, hints[item.name]) for item in dataclasses.fields(record)}


def _row(item: dataclasses.Field[Value], hint: object) -> Option:
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    alternatives: tuple[object, ...] = typing.get_args(hint) if is_union else (hint,)
    bare = [hint for hint in alternatives if hint is not type(None)]
    choices = bare[0] if typing.get_origin(bare[0]) is Literal else None
    metadata = typing.cast(dict[str, typing.Any], item.metadata)
    return Option(
        name=item.name,
        key=metadata["key"] or f"option.{item.name}",
        kind=str if choices else typing.cast(type[str], bare[0]),
        values=typing.get_args(choices) if choices else (),
        optional=len(bare) < len(alternatives),
        default=typing.cast(Value, item.default),
        minimum=metadata["minimum"],
        maximum=metadata["maximum"],
        doc=metadata["doc"],
        vllm=metadata["vllm"],
    )


def _article(kind: str) -> str:
    return f"one of {kind}" if "," in kind else f"a{'n' * (kind[0] in 'aeiou')} {kind}"
