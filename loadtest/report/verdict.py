"""Sentences of the report, generated from the figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from loadtest.report.style import STRATEGIES, duration, number, percent, ratio_text
from loadtest.results import Run

NOISE = 0.03
"""Relative difference below which two runs count as equal."""


def headline(runs: Sequence[Run]) -> str:
    """Return the title: the fastest run of the first workload and its lead over the others."""
    first = [run for run in runs if run.workload == runs[0].workload and not run.variant]
    best = max(first, key=lambda run: run.measures.requests_per_s)
    others = [run for run in first if run is not best and run.measures.requests_per_s > 0]
    rate = f"{number(best.measures.requests_per_s)} requests/s on {best.workload}"
    if not others:
        return f"{best.name} serves {rate}"
    leads = [
        f"{ratio_text(best.measures.requests_per_s / run.measures.requests_per_s)} {run.name}"
        for run in sorted(others, key=lambda run: -run.measures.requests_per_s)
    ]
    return f"{best.name} serves {rate}: {', '.join(leads)}"


def order(runs: Sequence[Run]) -> str | None:
    """Say whether the strategies rank as expected, and if not, which figures explain it.

    Returns None for fewer than two strategies.
    """
    by_name = {run.name: run for run in runs if not run.variant and run.name in STRATEGIES}
    ranked = [by_name[name] for name in STRATEGIES if name in by_name]
    if len(ranked) < 2:
        return None
    expected = " ≥ ".join(run.name for run in reversed(ranked))
    wrong = [
        (lower, higher)
        for lower, higher in pairwise(ranked)
        if higher.measures.requests_per_s < (1 - NOISE) * lower.measures.requests_per_s
    ]
    if not wrong:
        return f"{expected} in requests/s, as expected (differences below 3 % count as equal)."
    return f"Not {expected}. " + " ".join(_explanation(lower, higher) for lower, higher in wrong)


def _explanation(lower: Run, higher: Run) -> str:
    """Compare what determines requests/s: sequences per step and time per step."""
    ratio = higher.measures.requests_per_s / lower.measures.requests_per_s
    sentence = f"{higher.name} has {ratio_text(ratio)} the requests/s of {lower.name}"
    high, low = higher.measures.inside, lower.measures.inside
    if None in (high.batch, high.step_s, low.batch, low.step_s):
        return f"{sentence}; the servers export no step metrics."
    return (
        f"{sentence}: its steps run {number(high.batch)} sequences against {number(low.batch)}"
        f" and take {duration(high.step_s)} against {duration(low.step_s)}; it fills "
        f"{percent(high.kv_filled)} of its allocated KV cache against "
        f"{percent(low.kv_filled)}, with {number(high.preemptions)} preemptions."
    )


def remarks(runs: Sequence[Run]) -> Iterator[str]:
    """Yield caveats about the figures of these runs."""
    by_label: dict[str, list[Run]] = {}
    for run in runs:
        by_label.setdefault(f"{run.label} on {run.workload}", []).append(run)
    for label, label_runs in by_label.items():  # in a sweep, one run per rate
        yield from (f"{label}{text}" for text in _remarks(label_runs))
    if runs and all(run.measures.queue is None for run in runs):
        yield "No server reported queue times; in the Gantt charts, waiting includes the prefill."


def _remarks(runs: Sequence[Run]) -> Iterator[str]:
    measures = [run.measures for run in runs]
    errors = [record.error for run in runs for record in run.records if record.error]
    num_short = sum(measure.num_short for measure in measures)
    late_s = max(measure.late_s or 0.0 for measure in measures)
    other_cpu = max(measure.other_cpu or 0.0 for measure in measures)
    client_cpu = max(measure.client_cpu or 0.0 for measure in measures)
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
    if other_cpu > 0.2:
        yield (
            f": other processes used {number(other_cpu, 2)} cores of this machine during the run; "
            "measure again on an idle machine."
        )
    if client_cpu > 0.5:
        yield (
            f": the client used {number(client_cpu)} cores, which the server could not use if it "
            "ran on this machine."
        )
