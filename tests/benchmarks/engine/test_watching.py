"""How `benchmarks.engine.watching` evaluates its measurements."""

from __future__ import annotations

from benchmarks.engine.watching import Interval, report


def interval(wall_ms, cpu_ms, snapshot_us=0):
    return Interval({"wall": wall_ms / 1e3, "CPU": cpu_ms / 1e3}, snapshot_us / 1e6)


def test_each_interval_is_compared_with_its_neighbour():
    pairs = [(interval(w, w / 2), interval(w * 1.02, w / 2, 2.5)) for w in (1.0, 4.0, 1.0)]
    _, wall, cpu, share = report(pairs, 8).splitlines()
    assert wall.startswith("wall time per step: 1.000 ms alone, watched +2.00%")
    assert cpu.startswith("CPU time per step: 0.500 ms alone, watched +0.00%")
    assert share == "snapshots take 0.50% of the CPU time"
