"""What the figures say, in sentences that are made of them alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from loadtest.report.style import STRATEGIES, duration, number, percent, times
from loadtest.results import Run

NOISE = 0.03
"""Runs that differ by less than this share count as equal: a machine gives no more."""


def headline(runs: Sequence[Run]) -> str:
    """The answer: the fastest run of the first workload, and what it is ahead of."""
    first = [run for run in runs if run.workload == runs[0].workload and not run.variant]
    best = max(first, key=lambda run: run.measures.requests_per_s)
    others = [run for run in first if run is not best and run.measures.requests_per_s > 0]
    rate = f"{number(best.measures.requests_per_s)} requests/s on {best.workload}"
    if not others:
        return f"{best.name} answers {rate}"
    ahead = [
        f"{times(best.measures.requests_per_s / run.measures.requests_per_s)} {run.name}"
        for run in sorted(others, key=lambda run: -run.measures.requests_per_s)
    ]
    return f"{best.name} answers {rate}: {', '.join(ahead)}"


def order(runs: Sequence[Run]) -> str | None:
    """Whether strategies rank as they should, and where not, what the figures say why."""
    by_name = {run.name: run for run in runs if not run.variant and run.name in STRATEGIES}
    ranked = [by_name[name] for name in STRATEGIES if name in by_name]
    if len(ranked) < 2:
        return None
    wanted = " ≥ ".join(run.name for run in reversed(ranked))
    wrong = [
        (lower, higher)
        for lower, higher in pairwise(ranked)
        if higher.measures.requests_per_s < (1 - NOISE) * lower.measures.requests_per_s
    ]
    if not wrong:
        return f"{wanted} in requests/s, as it should be (what differs by less than 3 % is equal)."
    return f"Not {wanted}. " + " ".join(_why(lower, higher) for lower, higher in wrong)


def _why(lower: Run, higher: Run) -> str:
    """Requests per second are sequences in a step, over its time and the tokens of an answer."""
    ratio = higher.measures.requests_per_s / lower.measures.requests_per_s
    sentence = f"{higher.name} has {times(ratio)} the requests/s of {lower.name}"
    ours, theirs = higher.measures.inside, lower.measures.inside
    if None in (ours.batch, ours.step_s, theirs.batch, theirs.step_s):
        return f"{sentence}; the servers tell nothing of their steps."
    return (
        f"{sentence}: its steps hold {number(ours.batch)} sequences against {number(theirs.batch)}"
        f" and take {duration(ours.step_s)} against {duration(theirs.step_s)}; it fills "
        f"{percent(ours.kv_filled)} of the KV memory that it holds against "
        f"{percent(theirs.kv_filled)}, with {number(ours.preemptions)} preemptions."
    )


def remarks(runs: Sequence[Run]) -> Iterator[str]:
    """What a reader should know before believing the figures of these runs."""
    by_label: dict[str, list[Run]] = {}
    for run in runs:
        by_label.setdefault(f"{run.label} on {run.workload}", []).append(run)
    for label, own in by_label.items():  # of a sweep: all rates
        yield from (f"{label}{text}" for text in _remarks(own))
    if runs and all(run.measures.queue is None for run in runs):
        yield "No server told its queue times; in the Gantt charts waiting includes the prompt."


def _remarks(runs: Sequence[Run]) -> Iterator[str]:
    measures = [run.measures for run in runs]
    errors = [record.error for run in runs for record in run.records if record.error]
    num_short = sum(each.num_short for each in measures)
    late_s = max(each.late_s or 0.0 for each in measures)
    others = max(each.other_cpu or 0.0 for each in measures)
    client = max(each.client_cpu or 0.0 for each in measures)
    for run in runs:
        if not run.is_whole:
            yield f" was interrupted: its figures are of {run.measures.num_good} requests."
    if errors:
        yield f": {len(errors)} requests failed, the first with: {errors[0]}"
    if any(each.num_good and each.tokens_per_s is None for each in measures):
        yield ": the server does not count its tokens, so there are no tokens/s."
    if num_short:
        yield f": {num_short} answers have another length than was asked for."
    if late_s > 0.1:
        yield f": requests were sent up to {duration(late_s)} late."
    if others > 0.2:
        yield (
            f": other processes used {number(others, 2)} cores of this machine meanwhile; measure "
            "again when it is quiet."
        )
    if client > 0.5:
        yield (
            f": the client used {number(client)} cores, which on this machine the server did not "
            "have."
        )
