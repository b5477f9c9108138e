"""When requests are sent, where that does not wait for answers (an open loop)."""

from __future__ import annotations

import random
from collections.abc import Iterator

BURST = 16
"""Requests that come at once."""
CALM_SHARE = 0.5
"""Of all requests, those that come one by one between the bursts."""


def poisson(rate: float, rng: random.Random) -> Iterator[float]:
    """Independent requests, `rate` a second on average."""
    at_s = 0.0
    while True:
        at_s += rng.expovariate(rate)
        yield at_s


def bursts(rate: float, rng: random.Random) -> Iterator[float]:
    """The same rate on average, half of it in bursts of BURST requests at one moment."""
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
