"""The machine: its CPU, and whether it is idle."""

from __future__ import annotations

from pathlib import Path

import psutil

from core.process.processes import num_cores

INTERVAL_S = 1.0


def describe_machine() -> str:
    """Return the CPU's name, its vector extensions, and the cores available to this process."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    features = set(" ".join(line for line in lines if line.startswith("flags")).split())
    kinds = [kind for kind in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if kind in features]
    return f"{num_cores()} cores of {names[0] if names else 'a CPU'} ({' '.join(kinds)})"


def busy_cores() -> float:
    """Return how many cores other processes use, measured over INTERVAL_S."""
    return psutil.cpu_percent(INTERVAL_S) / 100 * (psutil.cpu_count() or 1)
