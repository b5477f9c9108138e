"""Rows as a Markdown table, with the PagedAttention paper's figures beside ours."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.simulate.comparison import Row
from benchmarks.simulate.system import SYSTEMS

PAPER = {
    "fastertransformer": "up to 22x",
    "orca-max": "2.7x to 8x",
    "orca-oracle": "1.7x to 2.7x",
}
"""What vLLM sustained over each of them on ShareGPT (SOSP 2023, section 6.2)."""


def table(rows: Sequence[Row], *, is_knee: bool) -> list[str]:
    """Lines of a Markdown table."""
    paged = next((row.rate for row in rows if row.system == "paged"), 0.0)
    lines = [_line([name for name, _ in _cells(rows[0], paged, is_knee)])] if rows else []
    lines += [_line(["---"] * len(_cells(rows[0], paged, is_knee)))] if rows else []
    return lines + [_line([cell for _, cell in _cells(row, paged, is_knee)]) for row in rows]


def _cells(row: Row, paged: float, is_knee: bool) -> list[tuple[str, str]]:
    cells = [("system", SYSTEMS[row.system].name)]
    if is_knee:
        ratio = f"{paged / row.rate:.1f}x" if row.rate and paged else "-"
        cells += [
            ("requests/s sustained", f"{row.rate:.3g}" if row.rate else "none"),
            ("paged over it", ratio),
            ("the paper, on ShareGPT", PAPER.get(row.system, "")),
        ]
    names = ["answers/s", "tokens/s", "s/token mean", "s/token p99", "TTFT p50 s", "TTFT p99 s",
             "sequences a step", "preemptions"]  # fmt: skip
    if row.outcome is None:
        return cells + [(name, "-") for name in names]
    figures = row.outcome.figures
    values = [
        f"{figures.requests_per_s:.3g}",
        f"{figures.tokens_per_s:.0f}",
        f"{figures.normalized_latency:.3f}",
        f"{figures.normalized_latency_p99:.3f}",
        f"{figures.first_token_p50:.2f}",
        f"{figures.first_token_p99:.2f}",
        f"{row.outcome.mean_batch:.1f}",
        str(row.outcome.num_preemptions),
    ]
    return cells + list(zip(names, values, strict=True))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
