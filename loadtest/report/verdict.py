"""Sentences of the report, generated from the figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from loadtest.report.causes import explanation
from loadtest.report.leading import LATENCY, THROUGHPUT
from loadtest.report.rounds import Rounds, doubt, in_rounds
from loadtest.report.style import STRATEGIES, duration, number, percent, ratio_text
from loadtest.study.measures import MAX_CLIENT_CORES, MAX_OTHER_CORES
from loadtest.study.results import Run


def headline(runs: Sequence[Run]) -> str:
    """Return the title: the winner on the first workload and its lead, or why there is none."""
    best, *others = ranking(runs, runs[0].workload)
    if others and best.measure is LATENCY:
        return _fastest_answer(best, others[0])
    rate = THROUGHPUT.value(best.typical)
    if not others:
        return f"{best.name} serves {number(rate)} requests/s on {runs[0].workload}"
    reason = doubt(best, others[0])
    if reason is not None:
        return f"Inconclusive on {runs[0].workload}: {reason}"
    leads = [
        f"{ratio_text(rate / other.median)} {other.name}"
        for other in others
        if other.median > 0 and doubt(best, other) is None
    ]
    return f"{best.name} serves {number(rate)} requests/s on {runs[0].workload}: {', '.join(leads)}"


def _fastest_answer(best: Rounds, second: Rounds) -> str:
    """Name the server with the shortest median latency, if the rounds prove it."""
    rate = number(THROUGHPUT.value(best.typical))
    text = f"All servers keep up with {rate} requests/s on {best.workload}"
    reason = doubt(best, second)
    if reason is not None:
        return f"{text}; inconclusive on latency: {reason}"
    return (
        f"{text}; {best.name} answers in {duration(best.median)} (median), "
        f"{second.name} in {duration(second.median)}"
    )


def ranking(runs: Sequence[Run], workload: str) -> list[Rounds]:
    """Return the servers of a workload, the best median first, without variants."""
    chosen = [run for run in runs if run.workload == workload and not run.variant]
    return sorted(in_rounds(chosen), key=lambda rounds: rounds.cost)


def winner(runs: Sequence[Run], workload: str) -> str | None:
    """Return the name of the server that proved to be the best on a workload, if one did."""
    best, *others = ranking(runs, workload)
    return best.name if others and doubt(best, others[0]) is None else None


def order(runs: Sequence[Run]) -> str | None:
    """Say which strategies differ, and how they work differently.

    runs: all runs of one workload. Returns None for fewer than two strategies.
    """
    by_name = {
        rounds.name: rounds
        for rounds in in_rounds([run for run in runs if not run.variant])
        if rounds.name in STRATEGIES
    }
    present = [by_name[name] for name in STRATEGIES if name in by_name]
    if len(present) < 2:
        return None
    sentences: list[str] = []
    for lower, higher in pairwise(present):
        ratio = higher.median / lower.median if lower.median else None
        reason = doubt(lower, higher)
        pair = f"{higher.name} has {ratio_text(ratio)} the {higher.measure.title} of {lower.name}"
        if reason is not None:
            sentences.append(f"{pair}, which proves no difference: {reason}.")
        else:
            measured = explanation(lower.typical, higher.typical)
            sentences.append(f"{pair}: {measured}." if measured else f"{pair}.")
    return " ".join(sentences)


def remarks(runs: Sequence[Run]) -> Iterator[str]:
    """Yield caveats about the figures of these runs."""
    by_label: dict[str, list[Run]] = {}
    for run in runs:
        by_label.setdefault(f"{run.label} on {run.workload}", []).append(run)
    for label, label_runs in by_label.items():  # one run per round, in a sweep one per rate
        yield from (f"{label}{text}" for text in _remarks(label_runs))
    if runs and all(run.measures.queue is None for run in runs):
        yield "No server reported queue times; in the Gantt charts, waiting includes the prefill."


def _remarks(runs: Sequence[Run]) -> Iterator[str]:
    measures = [run.measures for run in runs]
    errors = [record.error for run in runs for record in run.records if record.error]
    num_short = sum(measure.num_short for measure in measures)
    late_s = max(measure.late_s or 0.0 for measure in measures)
    for run in runs:
        if not run.is_whole:
            yield f" was interrupted: its figures cover {run.measures.num_good} requests."
    if errors:
        yield f": {len(errors)} requests failed, the first with: {errors[0]}"
    if any(measure.num_good and measure.tokens_per_s is None for measure in measures):
        yield ": the server does not report token counts, so tokens/s is unknown."
    if num_short:
        yield f": {num_short} outputs differ in length from what was requested."
    if late_s > 0.1:
        yield f": requests were sent up to {duration(late_s)} late."
    yield from _remarks_on_cores(runs)


def _remarks_on_cores(runs: Sequence[Run]) -> Iterator[str]:
    num_discarded = sum(run.num_discarded for run in runs)
    other_cpu = max(run.measures.other_cpu or 0.0 for run in runs)
    client_cpu = max(run.measures.client_cpu or 0.0 for run in runs)
    if num_discarded:
        yield f": {num_discarded} runs were discarded because other processes were busy."
    if other_cpu > MAX_OTHER_CORES:
        yield (
            f": other processes used {number(other_cpu, 2)} cores of this machine during a run; "
            "measure again on an idle machine."
        )
    if any(run.measures.other_cpu is None for run in runs):
        yield (
            ": its processes are unknown, so nothing says whether other processes disturbed it; "
            "see to it that its machine does nothing else."
        )
    if client_cpu > MAX_CLIENT_CORES:
        yield (
            f": the client was the bottleneck: it used {percent(client_cpu)} of a core during a "
            "run, and can use no more than one. The server may be faster than it seems; run the "
            "client on a faster machine, or send less (--rate, --users)."
        )
    elif client_cpu > 0.5:
        yield (
            f": the client used {number(client_cpu)} cores, which the server could not use if it "
            "ran on this machine."
        )
