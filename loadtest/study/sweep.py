"""Runs a workload at several rates to find the highest one that a server sustains."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from loadtest.load.plan import Load
from loadtest.load.request import Words
from loadtest.load.workloads import Workload
from loadtest.study.compare import with_limit
from loadtest.study.measure import measure
from loadtest.study.rate_search import RateSearch
from loadtest.study.results import Run
from loadtest.study.slo import holds
from loadtest.study.subjects import Subjects

MIN_REQUESTS = 20
"""Minimum number of requests per rate; percentiles of fewer mean little."""


def sweep(
    subjects: Subjects,
    workload: Workload,
    load: Load,
    slo: Mapping[str, float],
    *,
    seconds: float,
    rates: Sequence[float],
    first_rate: float,
    num_refinements: int,
    num_warm_up: int,
    on_run: Callable[[Run], None],
) -> bool:
    """Run every subject at one rate after another. Returns False if interrupted.

    seconds: span over which the requests of a rate fall due. It must be long enough for a
    backlog to build up if the rate is too high. rates: rates to try instead of a search.
    """
    words: Words | None = None
    for name in subjects.names:
        with subjects.open(name) as subject:
            if words is None:
                words = subject.endpoint.words()
                load = with_limit(load, subject.endpoint.max_length())
            search, fixed_rates = RateSearch(first_rate, num_refinements), iter(rates)
            while (rate := next(fixed_rates, None) if rates else search.next()) is not None:
                run = measure(
                    subject,
                    workload,
                    dataclasses.replace(
                        load, rate=rate, num_requests=max(MIN_REQUESTS, math.ceil(rate * seconds))
                    ),
                    words,
                    num_warm_up=num_warm_up,
                )
                run.rate = rate
                on_run(run)
                if not run.is_whole:
                    return False
                search.report(rate, held=holds(run.measures, slo))
    return True
