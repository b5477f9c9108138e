"""HTTP transport that yields response lines with the arrival times of their bytes."""

from __future__ import annotations

import http.client
import time
from collections.abc import Iterator
from typing import Protocol
from urllib.parse import urlsplit

READ_BYTES = 65536
ERROR_CHARACTERS = 300


class SendError(Exception):
    """The response is missing or incomplete; the message says why."""


class Transport(Protocol):
    """One user's connection to the server; not shared between users."""

    def lines(self, path: str, body: bytes) -> Iterator[tuple[float, bytes]]:
        """POST the body and yield each response line with the arrival time of its last bytes.

        The clock is `time.perf_counter`. Raises SendError unless the status is 200 and the body
        is complete.
        """
        ...

    def close(self) -> None:
        """Close the connection. May be called more than once; `lines` then reconnects."""
        ...


class HttpTransport:
    """An HTTP connection that is kept alive between requests."""

    def __init__(self, url: str, timeout_s: float) -> None:
        parts = urlsplit(url)
        kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        self._base = parts.path.rstrip("/")
        self._connection = kind(parts.hostname or "localhost", parts.port, timeout=timeout_s)

    def lines(self, path: str, body: bytes) -> Iterator[tuple[float, bytes]]:
        headers = {"Content-Type": "application/json"}
        is_whole = False
        try:
            response = self._post(path, body, headers)
            if response.status != 200:
                raise SendError(_status_error(response.status, response.read()))
            yield from split_lines(iter(lambda: response.read1(READ_BYTES), b""))
            # With a Content-Length, `read1` leaves the response open and the connection busy.
            response.close()
            is_whole = True
        except (OSError, http.client.HTTPException) as error:
            raise SendError(f"{type(error).__name__}: {error}") from None
        finally:
            if not is_whole:
                self.close()

    def _post(self, path: str, body: bytes, headers: dict[str, str]) -> http.client.HTTPResponse:
        """Send a request, again if the server has closed the connection after the last answer.

        llama.cpp's server does so after each stream, without saying so in the answer's headers.
        """
        is_kept = self._connection.sock is not None
        for may_be_closed in (is_kept, False):
            try:
                self._connection.request("POST", self._base + path, body, headers)
                return self._connection.getresponse()
            except ConnectionError:  # also http.client.RemoteDisconnected
                if not may_be_closed:
                    raise
                self._connection.close()
        raise AssertionError("the second attempt returns or raises")

    def get(self, path: str) -> bytes:
        """Return the body of a GET. Raises SendError."""
        try:
            self._connection.request("GET", self._base + path)
            response = self._connection.getresponse()
            data = response.read()
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise SendError(f"{type(error).__name__}: {error}") from None
        if response.status != 200:
            raise SendError(_status_error(response.status, data))
        return data

    def post(self, path: str, body: bytes) -> bytes:
        """Return the whole body of a POST response. Raises SendError."""
        return b"\n".join(line for _, line in self.lines(path, body))

    def close(self) -> None:
        self._connection.close()


def split_lines(parts: Iterator[bytes]) -> Iterator[tuple[float, bytes]]:
    """Yield each complete non-empty line with the arrival time of its last bytes."""
    rest = b""
    for part in parts:
        now = time.perf_counter()
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.strip():
                yield now, line
    if rest.strip():
        yield time.perf_counter(), rest


def _status_error(status: int, body: bytes) -> str:
    return f"{status}: {body.decode(errors='replace').strip()[:ERROR_CHARACTERS]}"
