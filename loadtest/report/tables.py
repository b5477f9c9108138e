"""Tables: a head and rows of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from loadtest.report.gantt import padding_share
from loadtest.report.style import UNKNOWN, duration, in_order, number, percent, times
from loadtest.results import Results, Run
from loadtest.slo import sustained, value_of


class Table(NamedTuple):
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    best: Sequence[int] = ()
    """Rows to set off."""


def answer(runs: Sequence[Run]) -> Table:
    """Requests per second by workload, with ratios to the reference, like the AWS article's."""
    workloads = list(dict.fromkeys(run.workload for run in runs))
    labels = in_order([run.label for run in runs])
    by_place = {(run.workload, run.label): run.measures.requests_per_s for run in runs}
    base = reference(labels)
    head = ["strategy"]
    for workload in workloads:
        head += [f"{workload}, requests/s", f"× {base}"]
    rows = []
    for label in labels:
        row = [label]
        for workload in workloads:
            rate, of = by_place.get((workload, label)), by_place.get((workload, base))
            row += [number(rate), times(rate / of if rate is not None and of else None)]
        rows.append(row)
    first = {
        label: by_place.get((workloads[0], label), 0.0) for label in labels if "," not in label
    }
    return Table(head, rows, [labels.index(max(first, key=first.__getitem__))])


def reference(labels: Sequence[str]) -> str:
    """What ratios are to: dynamic, as in the article, else the first."""
    return "dynamic" if "dynamic" in labels else labels[0]


Column = tuple[str, Callable[[Run], str]]
_OUTSIDE: Sequence[Column] = (
    ("requests/s", lambda run: number(run.measures.requests_per_s)),
    ("tokens/s", lambda run: number(run.measures.tokens_per_s)),
    ("awscurl tps", lambda run: number(run.measures.awscurl_tps)),
    ("first token p50", lambda run: _spread(run, "first_token", "p50")),
    ("p99", lambda run: _spread(run, "first_token", "p99")),
    ("between tokens p50", lambda run: _spread(run, "gap", "p50")),
    ("p99", lambda run: _spread(run, "gap", "p99")),
    ("max", lambda run: _spread(run, "gap", "max")),
    ("answer p50", lambda run: _spread(run, "latency", "p50")),
    ("p99", lambda run: _spread(run, "latency", "p99")),
    ("errors", lambda run: number(run.measures.num_errors)),
)
_INSIDE: Sequence[Column] = (
    ("sequences a step", lambda run: number(run.measures.inside.batch)),
    ("time a step", lambda run: duration(run.measures.inside.step_s)),
    ("queue p50", lambda run: _spread(run, "queue", "p50")),
    ("p99", lambda run: _spread(run, "queue", "p99")),
    ("KV held", lambda run: percent(run.measures.inside.kv_used)),
    ("filled of held", lambda run: percent(run.measures.inside.kv_filled)),
    ("padding", lambda run: percent(padding_share(run))),
    ("preemptions", lambda run: number(run.measures.inside.preemptions)),
    ("prefix hits", lambda run: percent(run.measures.inside.prefix_hits)),
    ("server cores", lambda run: number(run.measures.server_cpu, 2)),
    ("client cores", lambda run: number(run.measures.client_cpu, 2)),
    ("other cores", lambda run: number(run.measures.other_cpu, 2)),
    ("GPU", lambda run: percent(run.measures.gpu)),
)


def outside(runs: Sequence[Run]) -> Table:
    """What clients see."""
    return _of_columns(runs, _OUTSIDE)


def inside(runs: Sequence[Run]) -> Table:
    """Why: what the servers' own counters say."""
    return _of_columns(runs, _INSIDE)


def objectives(results: Results) -> Table:
    """Of a sweep: the highest rate that each run's server sustains."""
    head = ["strategy", "sustains, requests/s", "output tokens/s there", *results.slo]
    rows, rates = [], []
    for label in in_order([run.label for run in results.runs]):
        own = [run for run in results.runs if run.label == label]
        rate = sustained(own, results.slo)
        rates.append(rate or 0.0)
        if rate is None:
            lowest = min(run.rate or 0.0 for run in own)
            rows.append([label, f"less than {number(lowest)}", *[UNKNOWN] * (len(head) - 2)])
            continue
        there = next(run for run in own if run.rate == rate)
        values = [duration(value_of(there.measures, name)) for name in results.slo]
        rows.append([label, number(rate), number(there.measures.tokens_per_s), *values])
    return Table(head, rows, [rates.index(max(rates))])


def settings(results: Results) -> Table:
    """The properties of every server, those that all share once."""
    found: dict[str, dict[str, None]] = {}
    for run in results.runs:
        for key, value in run.settings.items():
            found.setdefault(key, {})[value] = None
    return Table(["property", "value"], [[key, ", ".join(found[key])] for key in sorted(found)])


def _of_columns(runs: Sequence[Run], columns: Sequence[Column]) -> Table:
    """Without columns of which nothing is known."""
    labels = in_order([run.label for run in runs])
    ranked = sorted(runs, key=lambda run: labels.index(run.label))
    known = [(title, of) for title, of in columns if any(of(run) != UNKNOWN for run in ranked)]
    rows = [[run.label, *(of(run) for _, of in known)] for run in ranked]
    return Table(["strategy", *(title for title, _ in known)], rows)


def _spread(run: Run, name: str, statistic: str) -> str:
    spread = getattr(run.measures, name)
    return duration(None if spread is None else getattr(spread, statistic))
