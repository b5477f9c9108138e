"""Decodes JSON of bounded size. The values are counted first, which is far cheaper than decoding.

No single call on a body of 16 MiB holds the interpreter lock for more than some 30 ms.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

import msgspec

from core.configuration.limits import JSON_DEPTH, JSON_OBJECTS, JSON_VALUES
from core.errors import RequestError

_SMALL_BYTES = 2 * JSON_OBJECTS.maximum
"""A list takes at least two bytes, so JSON of this size cannot exceed JSON_OBJECTS."""
_SLICE_BYTES = 2**20


def decode_json(data: bytes, field: str) -> object:
    """Decode JSON that is within the limits.

    Raises RequestError, naming `field`, if the JSON is beyond the limits, and ValueError if it is
    malformed.
    """
    if len(data) > _SMALL_BYTES:
        _check_counts(data, field)
    try:
        value = msgspec.json.decode(data)
    except RecursionError:
        raise _too_deep(field) from None
    if _count(data, b"[{") > JSON_DEPTH.maximum and _is_deep(value):
        raise _too_deep(field)
    return value


def _too_deep(field: str) -> RequestError:
    return RequestError(field, f"is nested deeper than {JSON_DEPTH.maximum} levels")


def _check_counts(data: bytes, field: str) -> None:
    """Check how many values there are, and how many of them are objects, lists or keys."""
    data = _without_escapes(data)
    JSON_VALUES.check(field, _count(data, b'"') // 2)
    structure = b"".join(data.split(b'"')[::2])  # the text outside of strings
    num_objects = _count(structure, b"[{")
    JSON_OBJECTS.check(field, max(num_objects, _count(structure, b":")))
    JSON_VALUES.check(field, num_objects + _count(structure, b","))


def _without_escapes(data: bytes) -> bytes:
    """Remove escaped quotes, so that every quote begins or ends a string."""
    if b"\\" not in data:
        return data
    return data.replace(b"\\\\", b"").replace(b'\\"', b"")


def _count(data: bytes, characters: bytes) -> int:
    return sum(part.count(bytes([byte])) for part in _slices(data) for byte in characters)


def _slices(data: bytes) -> Iterator[bytes]:
    """Cut the data, so that other threads get a turn between two slices."""
    return (data[start : start + _SLICE_BYTES] for start in range(0, len(data), _SLICE_BYTES))


def _is_deep(value: object) -> bool:
    """Return whether the value has more than JSON_DEPTH levels. Goes down level by level."""
    level = [value]
    for _ in range(JSON_DEPTH.maximum):
        level = [child for parent in level for child in _children(parent)]
        if not level:
            return False
    return True


def _children(parent: object) -> list[object]:
    if isinstance(parent, dict):
        parent = cast(dict[str, object], parent).values()
    return [child for child in cast(Iterable[object], parent) if isinstance(child, dict | list)]
