"""An HTTP request and the head of its response, as they travel between a gateway and a replica."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from core.process.http_headers import HOP_BY_HOP

Headers = tuple[tuple[bytes, bytes], ...]
"""Names and values in their order. A name may occur more than once."""

HOP_BY_HOP_BYTES = frozenset(name.encode() for name in HOP_BY_HOP)


@dataclass(frozen=True, slots=True)
class Request:
    """A request with its whole body, without hop-by-hop headers."""

    method: str
    target: bytes
    """Path and query, encoded as the client sent them."""
    headers: Headers
    body: bytes

    @property
    def path(self) -> str:
        return self.target.partition(b"?")[0].decode("ascii", "replace")

    def header(self, name: bytes) -> str | None:
        """Return the first value of a header, or None. name: in lower case."""
        values = (value for key, value in self.headers if key.lower() == name)
        value = next(values, None)
        return None if value is None else value.decode("latin-1")


@dataclass(frozen=True, slots=True)
class Head:
    """The status and the headers of a response. Its body follows in pieces."""

    status: int
    headers: Headers


class ReplicaLostError(Exception):
    """A replica, or its container, ended before the response was complete."""


def without(headers: Headers, names: Collection[bytes]) -> Headers:
    """Return the headers that have none of these names. names: in lower case."""
    return tuple((name, value) for name, value in headers if name.lower() not in names)
