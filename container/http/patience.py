"""How long a request waits for the engine, and whether its client waits with it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from core.errors import GenerationError, LongshoreError

T = TypeVar("T")

LOOK_INTERVAL_S = 0.5
"""How often a waiting request looks whether its client is still there."""


class ClientGoneError(LongshoreError):
    """Nobody is left to answer."""


class Patience:
    """Of one request; its time runs from when it is made."""

    def __init__(
        self,
        has_hung_up: Callable[[], bool],
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._has_hung_up = has_hung_up
        self._timeout_s = timeout_s
        self._clock = clock
        self._deadline = clock() + timeout_s
        self._look_due = clock() + LOOK_INTERVAL_S

    def wait(self, get: Callable[[float], T | None]) -> T:
        """What `get` gives, which takes how many seconds it may wait; None: nothing in that time.

        Raises GenerationError where time is up, ClientGoneError, and what `get` raises.
        """
        while True:
            self._check_client()
            left_s = self._deadline - self._clock()
            if left_s <= 0:
                raise GenerationError(
                    f"not finished within {self._timeout_s:g} s (option.predict_timeout)"
                )
            got = get(min(left_s, LOOK_INTERVAL_S))
            if got is not None:
                return got

    def _check_client(self) -> None:
        if self._clock() < self._look_due:
            return
        self._look_due = self._clock() + LOOK_INTERVAL_S
        if self._has_hung_up():
            raise ClientGoneError("the client has gone")
