"""Tables of the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from loadtest.report.gantt import padding_share
from loadtest.report.rounds import Rounds, in_rounds, typical_runs
from loadtest.report.style import UNKNOWN, duration, in_order, number, percent, ratio_text
from loadtest.report.verdict import winner
from loadtest.results import Results, Run
from loadtest.slo import goodput, sustained, value_of
from loadtest.tuning import TUNED, Trial, describe


class Table(NamedTuple):
    """Column headings and rows of formatted cells."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    best: Sequence[tuple[int, int]] = ()
    """Rows and columns of the cells to highlight."""


def throughput(runs: Sequence[Run]) -> Table:
    """Return requests/s by workload, with ratios to the reference as in the AWS article.

    Medians of the rounds, with the lowest and highest. The winner of a workload is highlighted if
    the rounds prove one.
    """
    workloads = list(dict.fromkeys(run.workload for run in runs))
    labels = in_order([run.label for run in runs])
    found = {(rounds.typical.workload, rounds.typical.label): rounds for rounds in in_rounds(runs)}
    by_place = {place: rounds.typical.measures.requests_per_s for place, rounds in found.items()}
    bases = {
        workload: reference([label for label in labels if (workload, label) in found])
        for workload in workloads
    }
    head = ["strategy"]
    for workload in workloads:
        head += [f"{workload}, requests/s", f"× {bases[workload]}"]
    rows = []
    for label in labels:
        row = [label]
        for workload in workloads:
            rate = by_place.get((workload, label))
            base_rate = by_place.get((workload, bases[workload]))
            ratio = rate / base_rate if rate is not None and base_rate else None
            rounds = found.get((workload, label))
            row += [with_range(rounds) if rounds else UNKNOWN, ratio_text(ratio)]
        rows.append(row)
    winners = [
        (labels.index(name), 1 + 2 * column)
        for column, workload in enumerate(workloads)
        if (name := winner(runs, workload)) is not None
    ]
    return Table(head, rows, winners)


def objective(bounds: Mapping[str, float]) -> str:
    """Say which bounds a request has to meet."""
    return ", ".join(f"{OBJECTIVES[kind]} ≤ {duration(limit)}" for kind, limit in bounds.items())


def goodputs(results: Results) -> Table:
    """Return the goodput of each workload, a row, on each server, a column."""
    runs = [run for run in results.runs if not run.variant]
    labels = in_order([run.label for run in runs])
    found = {
        (run.workload, run.label): number(goodput(run, results.objective))
        for run in typical_runs(runs)
    }
    workloads = dict.fromkeys(run.workload for run in runs)
    rows = [
        [workload, *(found.get((workload, label), UNKNOWN) for label in labels)]
        for workload in workloads
    ]
    return Table(["goodput, requests/s", *labels], rows)


def with_range(rounds: Rounds) -> str:
    """Format the median of requests/s, with the lowest and the highest round."""
    text = number(rounds.typical.measures.requests_per_s)
    if len(rounds.runs) == 1:
        return text
    return f"{text} ({number(rounds.rates[0])} to {number(rounds.rates[-1])})"


def reference(labels: Sequence[str]) -> str:
    """Return the label that ratios refer to: dynamic at its best, otherwise the first."""
    return next((name for name in (TUNED, "dynamic") if name in labels), labels[0])


OBJECTIVES = {
    "ttft": "time to first token",
    "itl": "mean inter-token latency",
    "e2e": "latency",
    "queue": "queue time",
}
"""What a bound on a request is about, by kind."""
Column = tuple[str, Callable[[Run], str]]
_CLIENT_COLUMNS: Sequence[Column] = (
    ("requests/s", lambda run: number(run.measures.requests_per_s)),
    ("tokens/s", lambda run: number(run.measures.tokens_per_s)),
    ("awscurl tps", lambda run: number(run.measures.awscurl_tps)),
    ("TTFT p50", lambda run: _spread(run, "first_token", "p50")),
    ("p99", lambda run: _spread(run, "first_token", "p99")),
    ("ITL p50", lambda run: _spread(run, "gap", "p50")),
    ("p99", lambda run: _spread(run, "gap", "p99")),
    ("max", lambda run: _spread(run, "gap", "max")),
    ("latency p50", lambda run: _spread(run, "latency", "p50")),
    ("p99", lambda run: _spread(run, "latency", "p99")),
    ("errors", lambda run: number(run.measures.num_errors)),
)
_SERVER_COLUMNS: Sequence[Column] = (
    ("sequences/step", lambda run: number(run.measures.inside.batch)),
    ("time/step", lambda run: duration(run.measures.inside.step_s)),
    ("queue p50", lambda run: _spread(run, "queue", "p50")),
    ("p99", lambda run: _spread(run, "queue", "p99")),
    ("KV cache allocated", lambda run: percent(run.measures.inside.kv_used)),
    ("filled of allocated", lambda run: percent(run.measures.inside.kv_filled)),
    ("padding", lambda run: percent(padding_share(run))),
    ("preemptions", lambda run: number(run.measures.inside.preemptions)),
    ("prefix cache hits", lambda run: percent(run.measures.inside.prefix_hits)),
    ("server cores", lambda run: number(run.measures.server_cpu, 2)),
    ("client cores", lambda run: number(run.measures.client_cpu, 2)),
    ("other cores", lambda run: number(run.measures.other_cpu, 2)),
    ("GPU", lambda run: percent(run.measures.gpu)),
)


def client_measures(runs: Sequence[Run]) -> Table:
    """Return the measures taken by the client."""
    return _table(runs, _CLIENT_COLUMNS)


def server_measures(runs: Sequence[Run]) -> Table:
    """Return the measures that explain the client's: server counters and CPU use."""
    return _table(runs, _SERVER_COLUMNS)


def objectives(results: Results) -> Table:
    """Return the highest rate that each server of a sweep sustains, with the bounded measures."""
    head = ["strategy", "sustained requests/s", "output tokens/s at that rate", *results.slo]
    rows, rates = [], []
    for label in in_order([run.label for run in results.runs]):
        label_runs = [run for run in results.runs if run.label == label]
        rate = sustained(label_runs, results.slo)
        rates.append(rate or 0.0)
        if rate is None:
            lowest = min(run.rate or 0.0 for run in label_runs)
            rows.append([label, f"less than {number(lowest)}", *[UNKNOWN] * (len(head) - 2)])
            continue
        best = next(run for run in label_runs if run.rate == rate)
        values = [duration(value_of(best.measures, name)) for name in results.slo]
        rows.append([label, number(rate), number(best.measures.tokens_per_s), *values])
    best = rates.index(max(rates))
    return Table(head, rows, [(best, column) for column in range(len(head))])


def trials(tried: Sequence[Trial]) -> Table:
    """Return the settings of dynamic batching that were tried, the first as given."""
    rows = [
        [f"{describe(trial.settings)}{'' if at else ' (as given)'}", number(trial.requests_per_s)]
        for at, trial in enumerate(tried)
    ]
    best = max(range(len(tried)), key=lambda at: tried[at].requests_per_s)
    return Table(["setting", "requests/s in one short run"], rows, [(best, 0), (best, 1)])


def settings(results: Results) -> Table:
    """Return the properties of all servers, with the distinct values of each."""
    found: dict[str, dict[str, None]] = {}
    for run in results.runs:
        for key, value in run.settings.items():
            found.setdefault(key, {})[value] = None
    return Table(["property", "value"], [[key, ", ".join(found[key])] for key in sorted(found)])


def _table(runs: Sequence[Run], columns: Sequence[Column]) -> Table:
    """Return a row per run, without the columns that no run has a value for."""
    labels = in_order([run.label for run in runs])
    ranked = sorted(runs, key=lambda run: labels.index(run.label))
    known = [
        (title, cell) for title, cell in columns if any(cell(run) != UNKNOWN for run in ranked)
    ]
    rows = [[run.label, *(cell(run) for _, cell in known)] for run in ranked]
    return Table(["strategy", *(title for title, _ in known)], rows)


def _spread(run: Run, name: str, statistic: str) -> str:
    spread = getattr(run.measures, name)
    return duration(None if spread is None else getattr(spread, statistic))
