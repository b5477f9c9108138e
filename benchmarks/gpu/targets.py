"""The targets of docs/benchmarks.md, and the figures that a run measured for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.report import Report

Rows = Sequence[dict[str, Any]]
"""A section's rows, with their derived figures."""
NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True)
class Target:
    what: str
    goal: str
    section: str
    values: Callable[[Rows], Sequence[float]]
    """The figures that must reach the goal."""
    form: str
    """How to format one of these figures."""
    is_limit: bool = False
    """Whether the figures must stay below the goal."""
    shape: str | None = None
    """The model shape that the goal is for, if it is for one."""


TARGETS = (
    Target(
        "decode, batch 64, context 4k",
        "≥ 90 % of the same run's copy rate",
        "decode",
        lambda rows: [
            row["of copy"]
            for row in rows
            if (row["batch"], row["context"]) == (64, 4096) and "of copy" in row
        ],
        "{:.0%}",
    ),
    Target(
        "decode, every shape",
        "≥ FlashInfer's speed",
        "decode",
        lambda rows: _speeds(rows, "flashinfer"),
        "{:.2f}× its speed",
    ),
    Target(
        "prefill, 8k, head dim 128",
        "≥ 450 TFLOP/s",
        "prefill",
        lambda rows: [
            row["TFLOP/s"] for row in rows if row["tokens"].endswith(" x 8192") and "TFLOP/s" in row
        ],
        "{:.0f} TFLOP/s",
    ),
    Target(
        "prefill against contiguous SDPA (flash)",
        "≥ 85 % of its speed",
        "prefill",
        lambda rows: _speeds(rows, "sdpa"),
        "{:.0%}",
    ),
    Target(
        "`sampling`: 256 rows of 128k logits, top-p 0.9",
        "≤ 0.4 ms",
        "sampling",
        lambda rows: [
            row["us"]["ours"] / 1000
            for row in rows
            if row["what"].startswith("top-p 0.9, 256 rows") and row["us"]["ours"]
        ],
        "{:.2f} ms",
        is_limit=True,
    ),
    Target(
        "`fp8`: decode, batch 64, context 4k",
        "≤ 0.65 of the time over bf16 caches",
        "fp8",
        lambda rows: [
            row["us"]["fp8"] / row["us"]["unquantized"]
            for row in rows
            if (row["batch"], row["context"]) == (64, 4096)
            and row["us"]["fp8"]
            and row["us"]["unquantized"]
        ],
        "{:.2f}",
        is_limit=True,
    ),
    Target(
        "`roofline`: decode step of the 7B, batch 50",
        "≥ 85 % of the roofline",
        "roofline",
        lambda rows: [
            row["of roofline"] for row in rows if row["batch"] == 50 and "of roofline" in row
        ],
        "{:.0%}",
        shape="llama-2-7b",
    ),
    Target(
        "`profile`: GPU idle between decode steps",
        "≤ 3 %",
        "profile",
        lambda rows: [
            row["share"]
            for row in rows
            if row["what"] == "idle between steps" and row["share"] is not None
        ],
        "{:.1%}",
        is_limit=True,
    ),
    Target(
        "`mixed`: GPU idle in steps with prompts of the 0.6B, as graphs",
        "≤ 5 %",
        "mixed",
        lambda rows: [
            row["GPU idle"]["graph"] for row in rows if row["GPU idle"]["graph"] is not None
        ],
        "{:.1%}",
        is_limit=True,
    ),
    Target(
        "`serve`: `paged` against `generate`",
        "≥ 5× its requests/s",
        "serve",
        lambda rows: _of_paged(rows, "x generate"),
        "{:.1f}×",
    ),
    Target(
        "`serve`: `paged` against `generate_batch`",
        "≥ 2× its requests/s",
        "serve",
        lambda rows: _of_paged(rows, "x generate_batch"),
        "{:.1f}×",
    ),
)


def targets_text(report: Report) -> str:
    """Return the table of docs/benchmarks.md with this run's figures.

    If several cases belong to a target, the figure is the worst of them.
    """
    lines = ["| what | target | measured |", "| --- | --- | --- |"]
    lines += [
        f"| {target.what} | {target.goal} | {measured(target, report)} |" for target in TARGETS
    ]
    return "\n".join([f"## Targets, on an H200 ({report.shape})", *lines, ""])


def measured(target: Target, report: Report) -> str:
    if target.section not in report.sections or target.shape not in (None, report.shape):
        return NOT_MEASURED
    values = target.values([row | figures for row, figures in report.rows(target.section)])
    if not values:
        return NOT_MEASURED
    worst = (max if target.is_limit else min)(values)
    count = f" (worst of {len(values)})" if len(values) > 1 else ""
    return target.form.format(worst) + count


def _speeds(rows: Rows, peer: str) -> list[float]:
    """Return our speed as a fraction of a peer's, for each row that has both times."""

    def times() -> Iterator[tuple[float | None, float | None]]:
        for row in rows:
            yield row["us"].get(peer), row["us"]["ours"]

    return [theirs / ours for theirs, ours in times() if theirs and ours]


def _of_paged(rows: Rows, figure: str) -> list[float]:
    return [row[figure] for row in rows if row["case"] == "paged" and figure in row]
