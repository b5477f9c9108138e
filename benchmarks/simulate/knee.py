"""Search for the highest request rate that a system sustains."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")

LOWEST_RATE = 1 / 1024
"""Lowest rate tried, in requests per second."""
PRECISION = 0.03


def highest_rate(
    attempt: Callable[[float], Found | None], start: float = 1.0
) -> tuple[float, Found] | None:
    """Return the highest rate for which `attempt` does not return None, with its result.

    Doubles or halves the rate from `start` until the highest rate is bracketed. Then bisects in the
    logarithm until the bracket's relative width is within PRECISION, and returns the lower end.
    Returns None if no rate down to LOWEST_RATE succeeds.
    """
    low, high = start, start
    found = attempt(start)
    while found is None:
        high, low = low, low / 2
        if low < LOWEST_RATE:
            return None
        found = attempt(low)
    while high <= low:
        better = attempt(2 * low)
        if better is None:
            high = 2 * low
        else:
            low, found = 2 * low, better
    while high / low > 1 + PRECISION:
        middle = (low * high) ** 0.5
        better = attempt(middle)
        if better is None:
            high = middle
        else:
            low, found = middle, better
    return low, found
