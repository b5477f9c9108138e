"""The machine: its CPU, whether it is idle, how fast it copies; and how its results begin."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import psutil

from core.process.processes import num_cores

INTERVAL_S = 1.0
QUIET = 0.1
"""A run counts as disturbed if other processes use more cores than this just before it."""
COPIED = 256 * 2**20
"""Bytes: many times as many as caches hold."""
NUM_COPIES = 7


def describe_machine() -> str:
    """Return the CPU's name, its vector extensions, and the cores available to this process."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    features = set(" ".join(line for line in lines if line.startswith("flags")).split())
    kinds = [kind for kind in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if kind in features]
    return f"{num_cores()} cores of {names[0] if names else 'a CPU'} ({' '.join(kinds)})"


def heading(benchmark: str, arguments: Sequence[str]) -> dict[str, str]:
    """Return the first entries of a file of results: the command, the time now, and the machine.

    benchmark: the module, such as `benchmarks.cpu`.
    """
    return {
        "command": f"python -m {benchmark} {shlex.join(arguments)}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
    }


def busy_cores() -> float:
    """Return how many cores other processes use, measured over INTERVAL_S."""
    return psutil.cpu_percent(INTERVAL_S) / 100 * (psutil.cpu_count() or 1)


def disturbance(name: str) -> list[str]:
    """Return what disturbs the run of a system that is about to start, if anything does."""
    others = busy_cores()
    return [f"{others:.1f} cores were busy before {name}"] if others > QUIET else []


def copy_rate() -> float:
    """Return the bytes per second that a copy by all cores reads and writes."""
    import torch  # only here: it takes seconds, and most of this package does without

    source = torch.ones(COPIED, dtype=torch.uint8)
    target, seconds = torch.zeros_like(source), list[float]()
    num_threads = torch.get_num_threads()  # OMP_NUM_THREADS may be less than all
    torch.set_num_threads(num_cores())
    for _ in range(NUM_COPIES):
        start = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - start)
    torch.set_num_threads(num_threads)
    return 2 * COPIED / median(seconds)
