"""Arrival processes of an open loop, where requests do not wait for responses."""

from __future__ import annotations

import random
from collections.abc import Iterator

BURST = 16
"""Requests per burst, all due at the same moment."""
CALM_SHARE = 0.5
"""Share of requests that arrive one by one between bursts."""


def poisson(rate: float, rng: random.Random) -> Iterator[float]:
    """Yield arrival times in seconds of a Poisson process with `rate` requests per second."""
    at_s = 0.0
    while True:
        at_s += rng.expovariate(rate)
        yield at_s


def bursts(rate: float, rng: random.Random) -> Iterator[float]:
    """Yield arrival times with mean rate `rate`, half of them in bursts of BURST requests."""
    calm = poisson(rate * CALM_SHARE, rng)
    period = BURST / (rate * (1 - CALM_SHARE))
    next_burst, at_s = period, next(calm)
    while True:
        if at_s < next_burst:
            yield at_s
            at_s = next(calm)
        else:
            yield from [next_burst] * BURST
            next_burst += period
