"""Tables of the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from loadtest.report.gantt import padding_share
from loadtest.report.leading import LATENCY, THROUGHPUT, Measure
from loadtest.report.rounds import Rounds, in_rounds, labels_of
from loadtest.report.style import UNKNOWN, duration, in_order, number, percent, ratio_text
from loadtest.report.verdict import winner
from loadtest.study.results import Results, Run
from loadtest.study.slo import goodput, sustained, value_of
from loadtest.study.tuning import TUNED, Trial, describe


class Table(NamedTuple):
    """Column headings and rows of formatted cells."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    best: Sequence[tuple[int, int]] = ()
    """Rows and columns of the cells to highlight."""


def markdown(table: Table) -> str:
    """Return a table in Markdown, the cells to highlight in bold."""
    rows = [
        [
            f"**{cell}**" if (row, column) in table.best else cell
            for column, cell in enumerate(cells)
        ]
        for row, cells in enumerate(table.rows)
    ]
    lines = [table.head, ["---"] * len(table.head), *rows]
    escaped = [[cell.replace("|", r"\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


def summary(runs: Sequence[Run]) -> Table:
    """Return requests/s by workload, with ratios to the reference as in the AWS article.

    If the latency leads, latencies and their ratios come first, and requests/s after them. Cells
    have the median of the rounds, with the lowest and the highest. The winner of a workload is
    highlighted if the rounds prove one.
    """
    found = in_rounds(runs)
    labels = labels_of(found)
    head, rows, winners = ["strategy"], [[label] for label in labels], list[tuple[int, int]]()
    for workload in dict.fromkeys(rounds.workload for rounds in found):
        by_label = {rounds.label: rounds for rounds in found if rounds.workload == workload}
        best = winner(runs, workload)
        if best is not None:
            winners.append((labels.index(best), len(head)))
        titles, cells = _columns(by_label)
        head += titles
        for row, label in zip(rows, labels, strict=True):
            row += cells.get(label, [UNKNOWN] * len(titles))
    return Table(head, rows, winners)


def _columns(by_label: Mapping[str, Rounds]) -> tuple[Sequence[str], dict[str, list[str]]]:
    """Return the titles of a workload's columns, and the cells of each server."""
    base = by_label[reference(in_order(list(by_label)))]
    titles = [f"{base.workload}, {base.measure.title}", f"× {base.label}"]
    cells: dict[str, list[str]] = {}
    for label, rounds in by_label.items():
        ratio = rounds.median / base.median if base.median else None
        cells[label] = [with_range(rounds), ratio_text(ratio)]
        if base.measure is LATENCY:
            cells[label].append(THROUGHPUT.text(THROUGHPUT.value(rounds.typical)))
    if base.measure is LATENCY:
        titles.append(f"{base.workload}, {THROUGHPUT.title}")
    return titles, cells


def objective(bounds: Mapping[str, float]) -> str:
    """Say which bounds a request has to meet."""
    return ", ".join(f"{OBJECTIVES[kind]} ≤ {duration(limit)}" for kind, limit in bounds.items())


def goodputs(results: Results) -> Table:
    """Return the goodput of each workload, or of each rate of a sweep, with a column per server."""
    if results.slo:
        return _goodputs_by_rate(results)
    runs = [run for run in results.runs if not run.variant]
    servers = in_rounds(runs)
    labels = labels_of(servers)
    found = {
        (rounds.workload, rounds.label): number(goodput(rounds.typical, results.objective))
        for rounds in servers
    }
    workloads = dict.fromkeys(run.workload for run in runs)
    rows = [
        [workload, *(found.get((workload, label), UNKNOWN) for label in labels)]
        for workload in workloads
    ]
    return Table(["goodput, requests/s", *labels], rows)


def _goodputs_by_rate(results: Results) -> Table:
    runs = results.runs
    labels = in_order([run.label for run in runs])
    found = {(run.rate, run.label): number(goodput(run, results.objective)) for run in runs}
    rows = [
        [f"at {number(rate)} sent", *(found.get((rate, label), UNKNOWN) for label in labels)]
        for rate in sorted({run.rate or 0.0 for run in runs})
    ]
    return Table(["goodput, requests/s", *labels], rows)


def with_range(rounds: Rounds) -> str:
    """Format the median of the measure, with the lowest and the highest round."""
    text, values = rounds.measure.text, rounds.values
    if len(values) == 1:
        return text(values[0])
    return f"{text(rounds.median)} ({text(values[0])} to {text(values[-1])})"


def reference(labels: Sequence[str]) -> str:
    """Return the label that ratios refer to: TUNED if present, else dynamic, else the first."""
    return next((name for name in (TUNED, "dynamic") if name in labels), labels[0])


OBJECTIVES = {
    "ttft": "time to first token",
    "itl": "mean inter-token latency",
    "e2e": "latency",
    "queue": "queue time",
}
"""Names of the figures that a bound limits, by kind."""
Column = tuple[str, Callable[[Run], str]]
_THROUGHPUT_COLUMNS: Sequence[Column] = (
    ("requests/s", lambda run: number(run.measures.requests_per_s)),
    ("tokens/s", lambda run: number(run.measures.tokens_per_s)),
    ("awscurl tps", lambda run: number(run.measures.awscurl_tps)),
)
_LATENCY_COLUMNS: Sequence[Column] = (
    ("latency p50", lambda run: _spread(run, "latency", "p50")),
    ("p99", lambda run: _spread(run, "latency", "p99")),
    ("TTFT p50", lambda run: _spread(run, "first_token", "p50")),
    ("p99", lambda run: _spread(run, "first_token", "p99")),
    ("ITL p50", lambda run: _spread(run, "gap", "p50")),
    ("p99", lambda run: _spread(run, "gap", "p99")),
    ("max", lambda run: _spread(run, "gap", "max")),
)
_ERRORS: Column = ("errors", lambda run: number(run.measures.num_errors))
_SERVER_COLUMNS: Sequence[Column] = (
    ("sequences/step", lambda run: number(run.measures.inside.batch)),
    ("most at once", lambda run: number(max(run.batches, default=None))),
    ("time/step", lambda run: duration(run.measures.inside.step_s)),
    ("host time/step", lambda run: duration(run.measures.inside.host_s)),
    ("queue p50", lambda run: _spread(run, "queue", "p50")),
    ("p99", lambda run: _spread(run, "queue", "p99")),
    ("KV cache allocated", lambda run: percent(run.measures.inside.kv_used)),
    ("filled of allocated", lambda run: percent(run.measures.inside.kv_filled)),
    ("padding", lambda run: percent(padding_share(run))),
    ("preemptions", lambda run: number(run.measures.inside.preemptions)),
    ("prefix cache hits", lambda run: percent(run.measures.inside.prefix_hits)),
    ("steps with drafts", lambda run: percent(run.measures.inside.steps_drafted)),
    ("drafts accepted", lambda run: percent(run.measures.inside.drafts_accepted)),
    ("server cores", lambda run: number(run.measures.server_cpu, 2)),
    ("client cores", lambda run: number(run.measures.client_cpu, 2)),
    ("other cores", lambda run: number(run.measures.other_cpu, 2)),
    ("GPU", lambda run: percent(run.measures.gpu)),
)


def client_measures(runs: Sequence[Run], leads: Measure = THROUGHPUT) -> Table:
    """Return the measures taken by the client, the leading ones first."""
    columns = [_THROUGHPUT_COLUMNS, _LATENCY_COLUMNS]
    if leads is LATENCY:
        columns.reverse()
    return _table(runs, [*columns[0], *columns[1], _ERRORS])


def server_measures(runs: Sequence[Run]) -> Table:
    """Return the measures that explain the client's: server counters and CPU use."""
    return _table(runs, _SERVER_COLUMNS)


def objectives(results: Results) -> Table:
    """Return the highest rate that each server of a sweep sustains, with figures at that rate.

    Nothing is highlighted if no server sustains a rate that was tried.
    """
    head = ["strategy", "sustained requests/s", "goodput", "output tokens/s", *results.slo]
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
        good = number(goodput(best, results.objective)) if results.objective else UNKNOWN
        rows.append([label, number(rate), good, number(best.measures.tokens_per_s), *values])
    best = rates.index(max(rates))
    return Table(head, rows, [(best, column) for column in range(len(head)) if rates[best]])


def trials(tried: Sequence[Trial]) -> Table:
    """Return the settings of dynamic batching that were tried."""
    rows = [
        [
            f"{describe(trial.settings)}{' (as given)' if trial.is_given else ''}",
            number(trial.requests_per_s),
        ]
        for trial in tried
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
    """Return a row per run, in the given order. Leave out columns for which no run has a value."""
    known = [(title, cell) for title, cell in columns if any(cell(run) != UNKNOWN for run in runs)]
    rows = [[run.label, *(cell(run) for _, cell in known)] for run in runs]
    return Table(["strategy", *(title for title, _ in known)], rows)


def _spread(run: Run, name: str, statistic: str) -> str:
    spread = getattr(run.measures, name)
    return duration(None if spread is None else getattr(spread, statistic))
