"""The start-up benchmark: peak memory and the time of each phase."""

from __future__ import annotations

import mmap
import re
import subprocess
import sys

import pytest

from benchmarks.engine.start import Peak
from tests.e2e.serving import DEMO, ROOT


@pytest.mark.matrix(cases=0)
def test_phases_and_memory_are_reported():
    """Runs in a new process, as this one could reuse memory that earlier tests have freed."""
    command = [sys.executable, "-m", "benchmarks.engine.start", str(DEMO)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    printed = done.stdout
    for name in ("imports", "trial of the first layers", "weights", "K and V", "first steps"):
        assert re.search(rf"^ +\d+\.\d\d s  {name}$", printed, re.MULTILINE), name
    assert "decoder: own (llama)" in printed
    (peak,) = re.findall(r"(\d+) MiB  peak, including (\d+) MiB of KV cache", printed)
    assert int(peak[0]) >= int(peak[1]) > 0


def test_peak_memory_includes_memory_freed_since():
    size, peak = 64 * 2**20, Peak()
    with peak.watching():
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for start in range(0, size, mmap.PAGESIZE):
            memory[start] = 1
        memory.close()
    assert 0.5 * size < peak.num_bytes < 2 * size
