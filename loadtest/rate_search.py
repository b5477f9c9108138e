"""A search for the highest rate that holds an objective."""

from __future__ import annotations

MAX_RATES = 16
"""Tried for one server, whatever it holds."""


class RateSearch:
    """The next rate to try: doubled until one fails, then between the best and the worst."""

    def __init__(self, first: float, num_refinements: int) -> None:
        self.highest: float | None = None
        """That held."""
        self._lowest_failed: float | None = None
        self._next = first
        self._num_left = num_refinements
        self._num_tried = 0

    def next(self) -> float | None:
        """None once the search is over."""
        if self._num_left < 0 or self._num_tried == MAX_RATES:
            return None
        self._num_tried += 1
        return self._next

    def take(self, rate: float, *, held: bool) -> None:
        """How it went with that rate."""
        if held:
            self.highest = rate
        else:
            self._lowest_failed = rate
        if self._lowest_failed is None:
            self._next = 2 * rate
            return
        self._num_left -= 1
        self._next = (self._lowest_failed + (self.highest or 0.0)) / 2
