"""An ordered list of contents with optional names."""

from __future__ import annotations


class PairList:
    """Pairs in insertion order; lookup by a duplicate key returns its first value."""

    def __init__(self) -> None:
        self.keys: list[str | None] = []
        self.values: list[bytes] = []

    def add(self, key: str | None = None, value: bytes = b"") -> None:
        self.keys.append(key)
        self.values.append(value)

    def size(self) -> int:
        return len(self.keys)

    def is_empty(self) -> bool:
        return not self.keys

    def get(self, key: str) -> bytes | None:
        """Return the first value of `key`, or None if it is missing."""
        return self.values[self.keys.index(key)] if key in self.keys else None

    def key_at(self, index: int) -> str | None:
        return self.keys[index]

    def value_at(self, index: int) -> bytes:
        return self.values[index]

    def get_keys(self) -> list[str | None]:
        return self.keys

    def get_values(self) -> list[bytes]:
        return self.values
