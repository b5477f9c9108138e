"""How long a request may wait for the engine, and whether its client is still connected."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from core.errors import GenerationError, LongshoreError

T = TypeVar("T")

CLIENT_CHECK_INTERVAL_S = 0.5
"""How often a waiting request checks that its client is still connected."""


class ClientGoneError(LongshoreError):
    """The client closed its connection before the response was complete."""

    status = 499  # nginx's status, which only logs and tests see

    def __init__(self) -> None:
        super().__init__("the client has disconnected")


class ArrivalTimeoutError(LongshoreError):
    """The client took too long to send its request."""

    status = 408


class Deadline:
    """The time limit of one request, counted from the creation of this object."""

    def __init__(
        self,
        has_hung_up: Callable[[], bool],
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._has_hung_up = has_hung_up
        self._timeout_s = timeout_s
        self._clock = clock
        self._expires_at = clock() + timeout_s
        self._next_client_check = clock() + CLIENT_CHECK_INTERVAL_S

    def wait(self, get: Callable[[float], T | None]) -> T:
        """Call `get(timeout_s)` until it returns a value, and return that value.

        `get` returns None when nothing arrived within `timeout_s`. Raises GenerationError when the
        time limit has passed, ClientGoneError when the client has disconnected, and whatever `get`
        raises.
        """
        while True:
            if self._clock() >= self._next_client_check:
                self._check_client()
            remaining_s = self._expires_at - self._clock()
            if remaining_s <= 0:
                raise GenerationError(
                    f"not finished within {self._timeout_s:g} s (option.predict_timeout)"
                )
            value = get(min(remaining_s, CLIENT_CHECK_INTERVAL_S))
            if value is not None:
                return value

    def _check_client(self) -> None:
        self._next_client_check = self._clock() + CLIENT_CHECK_INTERVAL_S
        if self._has_hung_up():
            raise ClientGoneError
