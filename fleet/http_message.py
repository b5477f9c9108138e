"""An HTTP request and the head of its response, as they travel from a gateway to a replica."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

Headers = tuple[tuple[bytes, bytes], ...]
"""Names and values in their order. A name may occur more than once."""

HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te",
     b"trailer", b"transfer-encoding", b"upgrade")
)  # fmt: skip
"""Headers that concern one connection alone (RFC 9110, section 7.6.1)."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request with its whole body, without the headers of a connection."""

    method: str
    target: bytes
    """Path and query, encoded as the client sent them."""
    headers: Headers
    body: bytes

    @property
    def path(self) -> str:
        return self.target.partition(b"?")[0].decode("ascii", "replace")

    def header(self, name: bytes) -> str | None:
        """Return the first header with this name, which is lower case, or None."""
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
    """Return the headers whose names are not among these, which are lower case."""
    return tuple((name, value) for name, value in headers if name.lower() not in names)
