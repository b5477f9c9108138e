"""A clock for tests."""

from __future__ import annotations


class Clock:
    """A clock that the test advances; each reading takes `step` seconds."""

    def __init__(self) -> None:
        self.now = 100.0
        self.step = 0.0

    def __call__(self) -> float:
        self.now += self.step
        return self.now
