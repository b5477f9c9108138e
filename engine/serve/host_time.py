"""How long the engine's loop was busy with other things than the model."""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.stopwatch import Stopwatch


class HostTime:
    """The time of the loop in which neither the model computed nor a message was waited for.

    It goes to handling messages, scheduling, building a step's inputs, sampling and sending. On a
    GPU, launching a step is part of it, and only waiting for the step's results is not.
    """

    def __init__(self, model: Stopwatch, clock: Callable[[], float] = time.monotonic) -> None:
        """model: runs while the model computes, or the loop waits for its results."""
        self.idle = Stopwatch(clock)
        """To be run while the loop waits for a message."""
        self._model = model
        self._clock = clock
        self._begin = clock()
        self._model_before = model.seconds
        self._last = 0.0

    def seconds(self) -> float:
        """Return the time since the start. It never falls, as counters of metrics must not."""
        elsewhere = self.idle.seconds + self._model.seconds - self._model_before
        self._last = max(self._last, self._clock() - self._begin - elsewhere)
        return self._last
