"""The machine: its CPU, and whether it is idle."""

from __future__ import annotations

import os
import time
from pathlib import Path

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
    before, started = _busy_s(), time.perf_counter()
    time.sleep(INTERVAL_S)
    return (_busy_s() - before) / (time.perf_counter() - started)


def _busy_s() -> float:
    """Return the total non-idle seconds of all cores from /proc/stat; I/O wait counts as idle."""
    fields = Path("/proc/stat").read_text().split("\n")[0].split()[1:9]
    numbers = [int(field) for field in fields]
    user, nice, system, _, _, irq, softirq, _ = numbers
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
