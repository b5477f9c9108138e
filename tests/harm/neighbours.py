"""Ordinary clients beside the hostile ones. Each is a thread that pings or streams repeatedly."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

PING_INTERVAL_S = 0.025
PROMPT = "Once upon a time"
TIMEOUT_S = 120.0
LOST = (OSError, http.client.HTTPException)
"""Raised by a request that loses its connection; `IncompleteRead` is no OSError."""
RETRY_S = 0.5
"""Pause after a failed request, so that a dead server is not asked in a busy loop."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One request of a neighbour, with times of `time.perf_counter`."""

    begin: float
    end: float
    failure: str
    """Why it failed; '' if it did not."""


class Neighbour:
    """A thread that calls `request` again and again.

    `request` returns '' or why it failed; it may raise one of `LOST`.
    """

    def __init__(self, request: Callable[[], str], interval_s: float = 0.0) -> None:
        self.attempts: list[Attempt] = []
        """The attempts that have ended, in order. The thread appends to this list."""
        self.begin: float | None = None
        """When the running request began; None between two requests."""
        self._request = request
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def during(self, begin: float, end: float) -> list[Attempt]:
        """Wait for the attempt that runs at `end`, then return those that overlap the interval."""
        while self.begin is not None and self.begin < end and self._thread.is_alive():
            time.sleep(0.001)
        attempts = list(self.attempts)
        return [attempt for attempt in attempts if attempt.end > begin and attempt.begin < end]

    def leave(self) -> None:
        """Send no more requests after the running one."""
        self._stop.set()

    def stop(self) -> None:
        """Leave, and wait until the running request has ended."""
        self.leave()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.begin = begin = time.perf_counter()
            try:
                failure = self._request()
            except LOST as error:
                failure = _reason(error)
            end = time.perf_counter()
            self.attempts.append(Attempt(begin, end, failure))
            self.begin = None
            pause_s = self._interval_s - (end - begin)
            self._stop.wait(max(pause_s, RETRY_S if failure else 0.0))


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def stop_all(neighbours: Sequence[Neighbour]) -> None:
    """Tell all to leave before waiting for any, so that their last requests run side by side."""
    for neighbour in neighbours:
        neighbour.leave()
    for neighbour in neighbours:
        neighbour.stop()


def connect(url: str, timeout_s: float = TIMEOUT_S) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    return http.client.HTTPConnection(parts.hostname or "localhost", parts.port, timeout=timeout_s)


def ping(url: str) -> str:
    """Request /ping on a new connection. Return '' or why it failed."""
    connection = connect(url)
    try:
        connection.request("GET", "/ping")
        response = connection.getresponse()
        response.read()
    except LOST as error:
        return _reason(error)
    finally:
        connection.close()
    return "" if response.status == 200 else f"status {response.status}"


def stream(url: str, **fields: object) -> str:
    """Stream a completion to its end. Return '' or why it failed."""
    body = {"prompt": PROMPT, "max_tokens": 24, "ignore_eos": True, "stream": True, **fields}
    connection = connect(url)
    try:
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        lines = response.read().split(b"\n")
    finally:
        connection.close()
    if response.status != 200:
        return f"status {response.status}"
    return why_wrong([line for line in lines if line.strip()])


def why_wrong(lines: list[bytes]) -> str:
    """Return '' for a stream that ended once, with a finish reason; otherwise what is wrong."""
    finished = [line for line in lines if b'"finish_reason":"' in line.replace(b": ", b":")]
    ends = [line for line in lines if line.strip() == b"data: [DONE]"]
    errors = [line for line in lines if b'"error"' in line]
    if errors:
        return errors[0].decode(errors="replace")
    if len(finished) != 1 or len(ends) != 1 or lines[-1] != ends[0]:
        return f"{len(finished)} finish reasons and {len(ends)} ends in {len(lines)} records"
    return ""
