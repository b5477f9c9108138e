"""The rounds of one workload on one server, and when two servers really differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.measures import MAX_OTHER_CORES
from loadtest.results import Run

MIN_ROUNDS = 3
"""Fewer rounds prove no difference."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """All runs of one workload on one server."""

    runs: Sequence[Run]

    @property
    def name(self) -> str:
        return self.runs[0].name

    @property
    def typical(self) -> Run:
        """The run with the median of requests/s, the lower one of two."""
        ordered = sorted(self.runs, key=lambda run: run.measures.requests_per_s)
        return ordered[(len(ordered) - 1) // 2]

    @property
    def rates(self) -> Sequence[float]:
        """Requests/s of all runs, ascending."""
        return sorted(run.measures.requests_per_s for run in self.runs)

    @property
    def other_cores(self) -> float:
        """The most cores that other processes used during any of the runs."""
        return max(run.measures.other_cpu or 0.0 for run in self.runs)

    @property
    def is_quiet(self) -> bool:
        return self.other_cores <= MAX_OTHER_CORES


def in_rounds(runs: Sequence[Run]) -> list[Rounds]:
    """Return the runs by workload and label, in the order in which they first appear."""
    by_place: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        by_place.setdefault((run.workload, run.label), []).append(run)
    return [Rounds(group) for group in by_place.values()]


def typical_runs(runs: Sequence[Run]) -> list[Run]:
    """Return the median run of each workload and label."""
    return [rounds.typical for rounds in in_rounds(runs)]


def doubt(one: Rounds, other: Rounds) -> str | None:
    """Return why the two do not prove a difference in requests/s; None if they do."""
    if min(len(one.runs), len(other.runs)) < MIN_ROUNDS:
        return f"there are fewer than {MIN_ROUNDS} rounds; use --rounds {MIN_ROUNDS}"
    for rounds in (one, other):
        if not rounds.is_quiet:
            return (
                f"other processes used {rounds.other_cores:.1f} cores while {rounds.name} ran; "
                "measure again on an idle machine"
            )
    if one.rates[0] <= other.rates[-1] and other.rates[0] <= one.rates[-1]:
        return (
            f"the rounds of {one.name} and {other.name} overlap; more requests per run "
            "(--requests) or more rounds narrow them"
        )
    return None
