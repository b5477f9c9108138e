"""The rounds of one workload on one server, and when two servers really differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.report.leading import LATENCY, Measure, leading
from loadtest.report.style import in_order
from loadtest.study.measures import MAX_OTHER_CORES
from loadtest.study.results import Run

MIN_ROUNDS = 3
"""Fewer rounds prove no difference."""
MIN_DIFFERENCE = 0.05
"""Medians that are closer, relative to the lower one, prove no difference.

Even if two servers are equally fast, their ranges of three rounds are apart in one of ten cases.
"""


@dataclass(frozen=True, slots=True)
class Rounds:
    """All runs of one workload on one server."""

    runs: Sequence[Run]
    measure: Measure
    """The figure by which the servers of this workload are compared."""

    @property
    def name(self) -> str:
        return self.runs[0].name

    @property
    def label(self) -> str:
        return self.runs[0].label

    @property
    def workload(self) -> str:
        return self.runs[0].workload

    @property
    def typical(self) -> Run:
        """The run with the median of the measure; of two middle runs, the lower one."""
        ordered = sorted(self.runs, key=self.measure.value)
        return ordered[(len(ordered) - 1) // 2]

    @property
    def median(self) -> float:
        return self.measure.value(self.typical)

    @property
    def cost(self) -> float:
        """The median, negated if more is better, so that a lower cost is always better."""
        return self.median if self.measure.is_cost else -self.median

    @property
    def values(self) -> Sequence[float]:
        """The measure of all runs, ascending."""
        return sorted(map(self.measure.value, self.runs))

    @property
    def other_cores(self) -> float:
        """The most cores that other processes used during any of the runs."""
        return max(run.measures.other_cpu or 0.0 for run in self.runs)

    @property
    def is_quiet(self) -> bool:
        return self.other_cores <= MAX_OTHER_CORES


def in_rounds(runs: Sequence[Run]) -> list[Rounds]:
    """Return the runs by workload and label, as tables and charts show them.

    Workloads are in the order in which they first appear. The servers of a workload are in the
    order of strategies; where the latency leads, the shortest comes first, and variants last.
    """
    found: list[Rounds] = []
    for workload in dict.fromkeys(run.workload for run in runs):
        by_label: dict[str, list[Run]] = {}
        for run in runs:
            if run.workload == workload:
                by_label.setdefault(run.label, []).append(run)
        measure = leading([run for group in by_label.values() for run in group])
        servers = [Rounds(by_label[label], measure) for label in in_order(list(by_label))]
        if measure is LATENCY:
            servers.sort(key=lambda rounds: (bool(rounds.typical.variant), rounds.cost))
        found += servers
    return found


def labels_of(found: Sequence[Rounds]) -> list[str]:
    """Return the labels in the order of rows.

    If the latency leads on the first workload, which the headline is about, rows have the order of
    its latencies; otherwise they have the order of strategies.
    """
    labels = [rounds.label for rounds in found]
    return list(dict.fromkeys(labels)) if found[0].measure is LATENCY else in_order(labels)


def doubt(one: Rounds, other: Rounds) -> str | None:
    """Return why the two do not prove a difference of their measure; None if they do."""
    for rounds in (one, other):
        if not rounds.is_quiet:
            return (
                f"other processes used {rounds.other_cores:.1f} cores while {rounds.name} ran; "
                "measure again on an idle machine"
            )
    if min(len(one.runs), len(other.runs)) < MIN_ROUNDS:
        return f"there are fewer than {MIN_ROUNDS} rounds; use --rounds {MIN_ROUNDS}"
    ones, others = one.values, other.values
    if ones[0] <= others[-1] and others[0] <= ones[-1]:
        return (
            f"the ranges of the rounds of {one.name} and {other.name} overlap; longer runs "
            "(--seconds, --requests) narrow them"
        )
    low, high = sorted(values[(len(values) - 1) // 2] for values in (ones, others))
    if high < (1 + MIN_DIFFERENCE) * low:
        return f"{one.name} and {other.name} are within {100 * MIN_DIFFERENCE:.0f} % of each other"
    return None
