"""Markdown table of the medians and ratios of alternating runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from benchmarks.cpu.systems import OFFLINE, OURS, OURS_OFFLINE, TITLES
from benchmarks.cpu.work import Result

Runs = Mapping[str, Sequence[Result]]
"""Results by system; results with the same index are from the same round."""


def table(runs: Runs) -> list[str]:
    """Return the lines of the table. Each ratio, ours to the system's, is a median over rounds.

    Systems that run offline are compared with ours offline, all others with ours over HTTP.
    """
    lines = [
        "| system | tokens/s | ours / system | tokens/s, one user | ours / system |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, results in runs.items():
        many = [result.tokens_per_s for result in results]
        one_user = [result.tokens_per_s_of_one for result in results]
        ours = runs[OURS_OFFLINE if name in OFFLINE else OURS]
        cells = [
            TITLES[name],
            spread(many),
            ratio([result.tokens_per_s for result in ours], many),
            spread(one_user),
            ratio([result.tokens_per_s_of_one for result in ours], one_user),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def share_line(one_user: Sequence[Result], num_bytes: int, rates: Sequence[float]) -> str:
    """Return how close our server comes to memory's speed with one user.

    num_bytes: of weights that a token reads. rates: of a copy in each round, in bytes per second.
    """
    shares = [
        result.tokens_per_s_of_one * num_bytes / rate
        for result, rate in zip(one_user, rates, strict=True)
    ]
    return (
        f"one user, {TITLES[OURS]}: {num_bytes / 1e6:.1f} MB of weights a token, "
        f"{median(shares):.0%} of the rate of a copy ({median(rates) / 1e9:.1f} GB/s)"
    )


def spread(values: Sequence[float], digits: int = 0) -> str:
    """Return the median and, of several values, the least and the greatest."""
    middle, least, most = (
        f"{value:.{digits}f}" for value in (median(values), min(values), max(values))
    )
    return middle if len(values) == 1 else f"{middle} ({least} to {most})"


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Return the median of the ratios in each round."""
    return f"{median(our / their for our, their in zip(ours, theirs, strict=True)):.2f}×"
