"""Service level objectives: latency bounds that a rate, or each request, must meet."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from loadtest.load.record import Record
from loadtest.study.measures import Measures
from loadtest.study.results import Run

KINDS = {"ttft": "first_token", "itl": "gap", "e2e": "latency", "queue": "queue"}
OF_A_REQUEST = {"ttft": "first_token_s", "itl": "itl_s", "e2e": "latency_s", "queue": "queue_s"}
STATISTICS = ("mean", "p50", "p90", "p99", "max")
MIN_PACE = 0.8
"""Lowest `pace` of a sustained rate: a smaller one means a growing backlog, not just the time that
the last responses take."""
_UNITS = {"ms": 1e-3, "s": 1.0}
_TERM = re.compile(
    rf"({'|'.join(KINDS)})_({'|'.join(STATISTICS)})=(\d+(?:\.\d+)?)({'|'.join(_UNITS)})"
)


def parse_slo(text: str) -> dict[str, float]:
    """Parse bounds such as `ttft_p99=2s,itl_p99=200ms` into seconds by name.

    Raises ValueError for a malformed bound.
    """
    bounds: dict[str, float] = {}
    for term in text.split(","):
        match = _TERM.fullmatch(term.strip())
        if match is None:
            raise ValueError(
                f"invalid bound '{term}': expected NAME_STATISTIC=VALUE, where NAME is one of "
                f"{', '.join(KINDS)}, STATISTIC one of {', '.join(STATISTICS)}, and VALUE is in s "
                "or ms, such as ttft_p99=2s"
            )
        kind, statistic, value, unit = match.groups()
        bounds[f"{kind}_{statistic}"] = float(value) * _UNITS[unit]
    return bounds


def value_of(measures: Measures, name: str) -> float | None:
    """Return the measured value in seconds that a bound with this name limits; None if unknown."""
    kind, statistic = name.rsplit("_", 1)
    spread = getattr(measures, KINDS[kind])
    return None if spread is None else getattr(spread, statistic)


def holds(measures: Measures, slo: Mapping[str, float]) -> bool:
    """Return whether no request failed, responses kept pace with arrivals, and all bounds are met.

    A bound whose measure is missing counts as not met.
    """
    values = {name: value_of(measures, name) for name in slo}
    return (
        measures.num_good > 0
        and not measures.num_errors
        and (measures.pace is None or measures.pace >= MIN_PACE)
        and all(value is not None and value <= slo[name] for name, value in values.items())
    )


def sustained(runs: Sequence[Run], slo: Mapping[str, float]) -> float | None:
    """Return the highest rate such that it and all lower rates tried met the objective, or None."""
    best = None
    for run in sorted(runs, key=lambda run: run.rate or 0.0):
        if not holds(run.measures, slo):
            break
        best = run.rate
    return best


def per_request(slo: Mapping[str, float]) -> dict[str, float]:
    """Return the bounds, by kind, that each single request has to meet.

    Statistics such as p99 describe many requests, so the loosest bound of a kind counts.
    """
    bounds: dict[str, float] = {}
    for name, limit in slo.items():
        kind = name.rsplit("_", 1)[0]
        bounds[kind] = max(limit, bounds.get(kind, limit))
    return bounds


def goodput(run: Run, bounds: Mapping[str, float]) -> float | None:
    """Return the successful requests per second that met all bounds of `per_request`.

    vLLM's benchmark counts goodput in the same way, after DistServe (OSDI 2024). Returns None if a
    bounded figure of a request is unknown.
    """
    met = [_meets(record, bounds) for record in run.records if record.is_good]
    return None if None in met else sum(map(bool, met)) / run.measures.seconds


def _meets(record: Record, bounds: Mapping[str, float]) -> bool | None:
    values = {kind: getattr(record, OF_A_REQUEST[kind]) for kind in bounds}
    if None in values.values():
        return None
    return all(value <= bounds[kind] for kind, value in values.items())
