"""Reads serving.properties, in Java's properties format, with line numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import javaproperties

from core.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Setting:
    """A key, its value as text, and where it was set."""

    key: str
    text: str
    source: str


def read_properties(path: Path) -> tuple[Setting, ...]:
    """Return all entries of the file in order, including repeated keys.

    Raises ConfigurationError if the file cannot be read or is malformed.
    """
    try:
        return tuple(parse_properties(path.read_text("utf-8"), str(path)))
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path}: byte {error.start} is not UTF-8") from None
    except javaproperties.InvalidUEscapeError as error:
        raise ConfigurationError(
            f"{path}: {error}; \\u must be followed by four hex digits"
        ) from None


def parse_properties(text: str, name: str) -> Iterator[Setting]:
    """Yield the entries of a file's text. `name` is the file name to put into `source`."""
    line = 1
    for element in javaproperties.parse(text):  # pyright: ignore[reportUnknownMemberType]
        if isinstance(element, javaproperties.KeyValue):
            # Java keeps trailing whitespace in a value. It is never intended, so strip it.
            yield Setting(element.key, element.value.strip(), f"{name}:{line}")
        line += len(element.source.splitlines())
