"""Search for the highest request rate that meets an objective."""

from __future__ import annotations

MAX_RATES = 16
"""Maximum number of rates tried per server."""


class RateSearch:
    """Doubles the rate until one misses the objective, then bisects.

    Bisects between the highest rate that met the objective and the lowest one that missed it.
    """

    def __init__(self, first: float, num_refinements: int) -> None:
        self.highest: float | None = None
        """Highest rate that met the objective."""
        self._lowest_failed: float | None = None
        self._next = first
        self._num_left = num_refinements
        self._num_tried = 0

    def next(self) -> float | None:
        """Return the next rate to try, or None once the search is over."""
        if self._num_left < 0 or self._num_tried == MAX_RATES:
            return None
        self._num_tried += 1
        return self._next

    def report(self, rate: float, *, held: bool) -> None:
        """Record whether `rate` met the objective."""
        if held:
            self.highest = rate
        else:
            self._lowest_failed = rate
        if self._lowest_failed is None:
            self._next = 2 * rate
            return
        self._num_left -= 1
        self._next = (self._lowest_failed + (self.highest or 0.0)) / 2
