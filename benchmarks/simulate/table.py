"""Markdown table of the results, with the PagedAttention paper's figures."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.simulate.comparison import SystemRow
from benchmarks.simulate.system import SYSTEMS

PAPER = {
    "fastertransformer": "up to 22x",
    "orca-max": "2.7x to 8x",
    "orca-oracle": "1.7x to 2.7x",
}
"""vLLM's sustained rate over that of each system on ShareGPT (SOSP 2023, section 6.2)."""


def table(rows: Sequence[SystemRow], *, is_knee: bool) -> list[str]:
    """Return the lines of the table. is_knee: rates are the highest sustained ones."""
    paged = next((row.rate for row in rows if row.system == "paged"), 0.0)
    lines = [_line([name for name, _ in _cells(rows[0], paged, is_knee)])] if rows else []
    lines += [_line(["---"] * len(_cells(rows[0], paged, is_knee)))] if rows else []
    return lines + [_line([cell for _, cell in _cells(row, paged, is_knee)]) for row in rows]


def _cells(row: SystemRow, paged: float, is_knee: bool) -> list[tuple[str, str]]:
    cells = [("system", SYSTEMS[row.system].name)]
    if is_knee:
        ratio = f"{paged / row.rate:.1f}x" if row.rate and paged else "-"
        cells += [
            ("requests/s sustained", f"{row.rate:.3g}" if row.rate else "none"),
            ("paged / system", ratio),
            ("paper, ShareGPT", PAPER.get(row.system, "")),
        ]
    names = ["requests/s served", "tokens/s", "s/token mean", "s/token p99", "TTFT p50 s",
             "TTFT p99 s", "sequences/step", "preemptions"]  # fmt: skip
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
