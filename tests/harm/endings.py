"""How requests end when their server is stopped or killed while they run."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

PROMPT = "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\n"
Kind = Literal["answered", "error", "cut"]


@dataclass(frozen=True, slots=True)
class Ending:
    """How one request ended.

    answered: the whole answer arrived. error: the server reported an error, as a status or as the
    last record of a stream. cut: neither arrived before the connection closed, so the client does
    not know why the request ended.
    """

    kind: Kind
    at: float
    """When it ended, in seconds of this process's monotonic clock."""
    detail: str


class Clients:
    """Sends all requests at the same time, each in a thread and on a connection of its own."""

    def __init__(self, port: int, *, num_streams: int, num_whole: int, max_new_tokens: int) -> None:
        self._port = port
        self._parameters = {"max_new_tokens": max_new_tokens, "ignore_eos": True}
        self._endings: list[Ending] = []
        self._threads = [
            threading.Thread(target=self._run, args=(number < num_streams,), daemon=True)
            for number in range(num_streams + num_whole)
        ]
        for thread in self._threads:
            thread.start()

    def wait(self, timeout_s: float) -> Sequence[Ending]:
        """Return how all requests ended. Raises TimeoutError if one is open after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        num_open = sum(thread.is_alive() for thread in self._threads)
        if num_open:
            raise TimeoutError(f"{num_open} requests are still open after {timeout_s:g} s")
        return self._endings

    def _run(self, is_stream: bool) -> None:
        body = {"inputs": PROMPT, "parameters": self._parameters, "stream": is_stream}
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        try:
            connection.request("POST", "/invocations", json.dumps(body))
            response = connection.getresponse()
            kind, detail = classify(response.status, response.read())
        except (OSError, http.client.HTTPException) as error:
            kind, detail = "cut", repr(error)
        finally:
            connection.close()
        self._endings.append(Ending(kind, time.monotonic(), detail))


def classify(status: int, body: bytes) -> tuple[Kind, str]:
    """Classify a response whose body has arrived whole. Return its kind and its error message."""
    lines = body.splitlines()
    try:
        last = json.loads(lines[-1])
    except (IndexError, ValueError):
        return "cut", f"status {status}, and the last line is not a record"
    if status != 200:
        return "error", str(last.get("error"))
    if "error_msg" in last.get("token", {}):
        return "error", last["token"]["error_msg"]
    if last.get("generated_text") is not None:
        return "answered", ""
    return "cut", "the last record does not end the answer"


def count(endings: Sequence[Ending]) -> Counter[Kind]:
    """Return how many requests ended in each way."""
    return Counter(ending.kind for ending in endings)
