"""The benchmark of a start: that it sees memory, and says what took how long."""

from __future__ import annotations

import mmap
import re

from benchmarks.start import Peak, main
from tests.e2e.serving import DEMO


def test_it_says_phases_and_memory(capsys):
    assert main([str(DEMO)]) == 0
    told = capsys.readouterr().out
    for name in ("imports", "trial of the first layers", "weights", "K and V", "first steps"):
        assert re.search(rf"^ +\d+\.\d\d s  {name}$", told, re.MULTILINE), name
    assert "decoder: own (llama)" in told
    (peak,) = re.findall(r"(\d+) MiB  at most, with (\d+) MiB of K/V", told)
    assert int(peak[0]) >= int(peak[1]) > 0


def test_memory_that_was_there_for_a_while_counts():
    size, peak = 64 * 2**20, Peak()
    with peak.watching():
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for start in range(0, size, mmap.PAGESIZE):
            memory[start] = 1
        memory.close()
    assert 0.5 * size < peak.num_bytes < 2 * size
