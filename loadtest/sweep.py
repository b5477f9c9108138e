"""Which rate of requests a server sustains: a search for the highest that holds an SLO."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from loadtest.compare import with_limit
from loadtest.measure import measure
from loadtest.plan import Load
from loadtest.results import Run
from loadtest.slo import holds
from loadtest.subjects import Subjects
from loadtest.words import Words
from loadtest.workloads import Workload

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


def sweep(
    subjects: Subjects,
    workload: Workload,
    load: Load,
    slo: Mapping[str, float],
    *,
    rates: Sequence[float],
    first_rate: float,
    num_refinements: int,
    num_warm_up: int,
    on_run: Callable[[Run], None],
) -> bool:
    """Every subject at one rate after another; False if it was interrupted.

    rates: those to try, in place of a search.
    """
    words: Words | None = None
    for name in subjects.names:
        with subjects.open(name) as subject:
            if words is None:
                words = subject.endpoint.words()
                load = with_limit(load, subject.endpoint.max_length())
            search, given = RateSearch(first_rate, num_refinements), iter(rates)
            while (rate := next(given, None) if rates else search.next()) is not None:
                run = measure(
                    subject,
                    workload,
                    dataclasses.replace(load, rate=rate),
                    words,
                    num_warm_up=num_warm_up,
                )
                run.rate = rate
                on_run(run)
                if not run.is_whole:
                    return False
                search.take(rate, held=holds(run.measures, slo))
    return True


def sustained(runs: Sequence[Run], slo: Mapping[str, float]) -> float | None:
    """The highest rate below which every one that was tried held; None if not even the lowest."""
    best = None
    for run in sorted(runs, key=lambda run: run.rate or 0.0):
        if not holds(run.measures, slo):
            break
        best = run.rate
    return best
