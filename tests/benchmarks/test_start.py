"""The start-up benchmark: peak memory and the time of each phase."""

from __future__ import annotations

import mmap
import re

from benchmarks.start import Peak, main
from tests.e2e.serving import DEMO


def test_phases_and_memory_are_reported(capsys):
    assert main([str(DEMO)]) == 0
    printed = capsys.readouterr().out
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
