"""serving.properties as Java reads it: keys and values, each with its line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import javaproperties

from core.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Setting:
    """A key and its value as text, and where somebody wrote them."""

    key: str
    text: str
    source: str


def read_properties(path: Path) -> tuple[Setting, ...]:
    """Every entry of the file in its order, repeated keys included.

    Raises ConfigurationError where the file cannot be read or is not in Java's format.
    """
    try:
        return tuple(parse_properties(path.read_text("utf-8"), str(path)))
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path}: byte {error.start} is not UTF-8") from None
    except javaproperties.InvalidUEscapeError as error:
        raise ConfigurationError(f"{path}: {error}; four hex digits follow a \\u") from None


def parse_properties(text: str, name: str) -> Iterator[Setting]:
    """The entries of a file's text; `name` is the file's name in their sources."""
    line = 1
    for element in javaproperties.parse(text):  # pyright: ignore[reportUnknownMemberType]
        if isinstance(element, javaproperties.KeyValue):
            # Java keeps blanks at the end of a value, where nobody sees or means them.
            yield Setting(element.key, element.value.strip(), f"{name}:{line}")
        line += len(element.source.splitlines())
