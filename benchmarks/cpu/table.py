"""Medians and ratios of alternating runs, as a Markdown table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from benchmarks.cpu.systems import OURS, WHAT
from benchmarks.cpu.work import Result

Runs = Mapping[str, Sequence[Result]]
"""By system; those at the same place ran after one another."""


def table(runs: Runs) -> list[str]:
    """Lines. A ratio is ours over the system's, the median over pairs of runs."""
    lines = [
        "| system | tokens/s | ours over it | tokens/s of one user | ours over it |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, results in runs.items():
        many = [each.tokens_per_s for each in results]
        one = [each.tokens_per_s_of_one for each in results]
        ours = runs[OURS]
        cells = [
            WHAT[name],
            _spread(many),
            _ratio([each.tokens_per_s for each in ours], many),
            _spread(one),
            _ratio([each.tokens_per_s_of_one for each in ours], one),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _spread(values: Sequence[float]) -> str:
    middle = f"{median(values):.0f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.0f} to {max(values):.0f})"


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    return f"{median(our / their for our, their in zip(ours, theirs, strict=True)):.2f}×"
