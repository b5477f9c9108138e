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
    for run in runs:
        measures, label = run.measures, f"{run.label} on {run.workload}"
        if not run.is_whole:
            yield f"{label} was interrupted: its figures are of {measures.num_good} requests."
        if measures.num_errors:
            error = next(record.error for record in run.records if record.error)
            yield f"{label}: {measures.num_errors} requests failed, the first with: {error}"
        if measures.num_good and measures.tokens_per_s is None:
            yield f"{label}: the server does not count its tokens, so there are no tokens/s."
        if measures.num_short:
            yield f"{label}: {measures.num_short} answers have another length than was asked for."
        if (measures.late_s or 0) > 0.1:
            yield f"{label}: requests were sent up to {duration(measures.late_s)} late."
        if (measures.other_cpu or 0) > 0.2:
            yield (
                f"{label}: other processes used {number(measures.other_cpu, 2)} cores of this "
                "machine meanwhile; measure again when it is quiet."
            )
        if (measures.client_cpu or 0) > 0.5:
            yield (
                f"{label}: the client used {number(measures.client_cpu)} cores, which on this "
                "machine the server did not have."
            )
    if runs and all(run.measures.queue is None for run in runs):
        yield "No server told its queue times; in the Gantt charts waiting includes the prompt."
