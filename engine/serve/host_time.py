"""The time that the engine's loop spends outside the model."""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.stopwatch import Stopwatch


class HostTime:
    """Adds up the loop's time, except while the model computes or the loop waits for a message.

    That is the time of handling messages, scheduling, building a step's inputs, sampling and
    sending. On a GPU, launching a step is part of it; waiting for the step's results is not.
    """

    def __init__(self, model: Stopwatch, clock: Callable[[], float] = time.monotonic) -> None:
        """model: runs while the model computes, or the loop waits for its results."""
        self.idle = Stopwatch(clock)
        """The loop runs this while it waits for a message."""
        self._model = model
        self._clock = clock
        self._begin = clock()
        self._model_before = model.seconds
        self._last = 0.0

    def seconds(self) -> float:
        """Return the sum since the start. It never falls, because it is a counter in `/metrics`."""
        elsewhere = self.idle.seconds + self._model.seconds - self._model_before
        self._last = max(self._last, self._clock() - self._begin - elsewhere)
        return self._last
