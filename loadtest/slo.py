"""Service level objectives: bounds on latency that a rate must hold."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from loadtest.measures import Measures
from loadtest.results import Run

KINDS = {"ttft": "first_token", "itl": "gap", "e2e": "latency", "queue": "queue"}
STATISTICS = ("mean", "p50", "p90", "p99", "max")
MIN_PACE = 0.8
"""Of a rate that is sustained: what is missing must be the last answers' length, not a backlog."""
_UNITS = {"ms": 1e-3, "s": 1.0}
_TERM = re.compile(
    rf"({'|'.join(KINDS)})_({'|'.join(STATISTICS)})=(\d+(?:\.\d+)?)({'|'.join(_UNITS)})"
)


def parse_slo(text: str) -> dict[str, float]:
    """Bounds in seconds, by their names, of a text such as `ttft_p99=2s,itl_p99=200ms`.

    Raises ValueError for what is no bound.
    """
    bounds: dict[str, float] = {}
    for term in text.split(","):
        match = _TERM.fullmatch(term.strip())
        if match is None:
            raise ValueError(
                f"'{term}' is no bound: write NAME_STATISTIC=VALUE with a NAME of "
                f"{', '.join(KINDS)}, a STATISTIC of {', '.join(STATISTICS)}, and a VALUE in s "
                "or ms, as in ttft_p99=2s"
            )
        kind, statistic, value, unit = match.groups()
        bounds[f"{kind}_{statistic}"] = float(value) * _UNITS[unit]
    return bounds


def value_of(measures: Measures, name: str) -> float | None:
    """What was measured of a bound's name, in seconds."""
    kind, statistic = name.rsplit("_", 1)
    spread = getattr(measures, KINDS[kind])
    return None if spread is None else getattr(spread, statistic)


def holds(measures: Measures, slo: Mapping[str, float]) -> bool:
    """Every request was answered at the pace of arrivals, and every bound is kept.

    What was not measured is not kept.
    """
    values = {name: value_of(measures, name) for name in slo}
    return (
        measures.num_good > 0
        and not measures.num_errors
        and (measures.pace is None or measures.pace >= MIN_PACE)
        and all(value is not None and value <= slo[name] for name, value in values.items())
    )


def sustained(runs: Sequence[Run], slo: Mapping[str, float]) -> float | None:
    """The highest rate below which every one that was tried held; None if not even the lowest."""
    best = None
    for run in sorted(runs, key=lambda run: run.rate or 0.0):
        if not holds(run.measures, slo):
            break
        best = run.rate
    return best
