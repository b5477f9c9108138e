"""The targets of docs/benchmarks.md, and the figures that a run measured for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        lambda rows: _figures(rows, "of copy", batch=64, context=4096),
        "{:.0%}",
    ),
    Target(
        "decode, every shape",
        "≥ FlashInfer's speed",
        "decode",
        lambda rows: _ratios(rows, "flashinfer", "ours"),
        "{:.2f}× its speed",
    ),
    Target(
        "prefill, 8k, head dim 128",
        "≥ 450 TFLOP/s",
        "prefill",
        lambda rows: _figures(rows, "TFLOP/s", tokens="4 x 8192"),
        "{:.0f} TFLOP/s",
    ),
    Target(
        "prefill against contiguous SDPA (flash)",
        "≥ 85 % of its speed",
        "prefill",
        lambda rows: _ratios(rows, "sdpa", "ours"),
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
        "decode over fp8 caches, batch 64, context 4k",
        "≤ 0.65 of the time over bf16 caches",
        "decode",
        lambda rows: _over_fp8_caches(rows, batch=64, context=4096, block=16, layout="NHD"),
        "{:.2f}",
        is_limit=True,
    ),
    Target(
        "`latents`: decode over latents, every shape",
        "≥ FlashInfer's speed",
        "latents",
        lambda rows: _ratios(rows, "flashinfer", "ours"),
        "{:.2f}× its speed",
    ),
    Target(
        "`expanded`: prompt of 8k over latents",
        "≥ 2× the absorbed form's speed",
        "expanded",
        lambda rows: _ratios(rows, "absorbed", "ours", new=8192),
        "{:.1f}×",
    ),
    Target(
        "`roofline`: decode step of the 7B, batch 50",
        "≥ 85 % of the roofline",
        "roofline",
        lambda rows: _figures(rows, "of roofline", batch=50),
        "{:.0%}",
        shape="llama-2-7b",
    ),
    Target(
        "`profile`: GPU idle between decode steps",
        "≤ 3 %",
        "profile",
        lambda rows: _figures(rows, "share", what="idle between steps"),
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
        lambda rows: _figures(rows, "x generate", case="paged"),
        "{:.1f}×",
    ),
    Target(
        "`serve`: `paged` against `generate_batch`",
        "≥ 2× its requests/s",
        "serve",
        lambda rows: _figures(rows, "x generate_batch", case="paged"),
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


def _figures(rows: Rows, name: str, **having: object) -> list[Any]:
    """Return a figure of the rows that have these values, and that figure."""
    found = [row for row in rows if having.items() <= row.items()]
    return [row[name] for row in found if row.get(name) is not None]


def _ratios(rows: Rows, name: str, other: str, **having: object) -> list[float]:
    """Return the time of `name` over that of `other`, for the rows with these values and times."""
    times = _figures(rows, "us", **having)
    return [us[name] / us[other] for us in times if us.get(name) and us.get(other)]


def _over_fp8_caches(rows: Rows, **having: object) -> list[float]:
    """Return the time over fp8 caches over that over bf16 caches, by shape."""
    fp8, bf16 = (
        {
            row["shape"]: row["us"]["ours"]
            for row in rows
            if (having | {"kv": kv}).items() <= row.items()
        }
        for kv in ("float8_e4m3fn", "bfloat16")
    )
    return [us / bf16[shape] for shape, us in fp8.items() if us and bf16.get(shape)]
