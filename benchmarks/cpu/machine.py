"""Where it is measured, and whether it is alone there."""

from __future__ import annotations

import os
import time
from pathlib import Path

LOOK_S = 1.0


def describe_machine() -> str:
    """The processor by its name, and how many cores of it there are for this process."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    features = set(" ".join(line for line in lines if line.startswith("flags")).split())
    kinds = [kind for kind in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if kind in features]
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores of {names[0] if names else 'a CPU'} ({' '.join(kinds)})"


def busy_cores() -> float:
    """How many cores are in use, while this process only waits."""
    before, started = _busy_s(), time.perf_counter()
    time.sleep(LOOK_S)
    return (_busy_s() - before) / (time.perf_counter() - started)


def _busy_s() -> float:
    """Seconds that all cores together were neither idle nor waiting for a disk; /proc/stat."""
    numbers = [int(each) for each in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    user, nice, system, _, _, irq, softirq, _ = numbers
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
