"""Clients that stream without a pause, and the outcome of each of their requests."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one request, as its client saw it."""

    kind: str
    """complete, refused (a status other than 200), cut (only a part came) or unreachable."""
    detail: str = ""


class Load:
    """Sends streaming requests from several threads, each request on a new connection."""

    def __init__(self, port: int, num_clients: int, num_tokens: int) -> None:
        self.outcomes: list[Outcome] = []
        self._port = port
        self._body = {
            "inputs": "ROMEO:",
            "parameters": {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens},
            "stream": True,
        }
        self._num_tokens = num_tokens
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(num_clients)]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run during the block, and let the last requests end after it."""
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._stopping.set()
            for thread in self._threads:
                thread.join()

    @property
    def kinds(self) -> Counter[str]:
        return Counter(outcome.kind for outcome in self.outcomes)

    @property
    def failures(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.kind != "complete"]

    def wait_for(self, num_outcomes: int) -> None:
        """Wait until this many more requests have ended."""
        wanted = len(self.outcomes) + num_outcomes
        deadline = time.monotonic() + TIMEOUT_S
        while len(self.outcomes) < wanted:
            assert time.monotonic() < deadline, f"only {self.kinds}"
            time.sleep(0.05)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.outcomes.append(self._request())

    def _request(self) -> Outcome:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_S)
        try:
            connection.request("POST", "/invocations", json.dumps(self._body))
            response = connection.getresponse()
            if response.status != 200:
                return Outcome("refused", f"{response.status} {response.read()!r}")
        except (OSError, http.client.HTTPException) as error:
            return Outcome("unreachable", repr(error))
        lines: list[bytes] = []
        try:
            lines = list(response)
        except (OSError, http.client.HTTPException) as error:
            return Outcome("cut", repr(error))
        finally:
            connection.close()
        if len(lines) == self._num_tokens and b"generated_text" in lines[-1]:
            return Outcome("complete")
        return Outcome("cut", f"{len(lines)} lines, the last {lines[-1:]!r}")
