"""The benchmark of decode steps runs, and counts the bytes of the weights."""

from __future__ import annotations

import pytest

from benchmarks.engine.decode import measure

RATE = 1e6
"""Of a copy, in bytes per second: a true one is so high that a slow step's share is 0 %."""


@pytest.mark.matrix(cases=0)
def test_a_row_says_how_many_bytes_a_step_moves(monkeypatch):
    """Two layers, 64 wide, have 73,728 weights, and the head 25,600."""
    monkeypatch.setattr("benchmarks.engine.decode.COPIED", 2**20)
    monkeypatch.setattr("benchmarks.engine.decode.copy_rates", lambda *_: (RATE, RATE))
    row = measure("dry", 2, "bf16", None, 1, 2)
    _, shape, count, moved, milliseconds, of_wall, of_cpu, _ = row.split("|")
    assert (shape.strip(), count.strip()) == ("dry", "2")
    num_bytes = 2 * (73728 + 25600)
    assert float(moved) == pytest.approx(num_bytes / 1e6, abs=0.06)
    seconds = num_bytes / RATE / (float(of_wall.strip(" %")) / 100)
    assert float(milliseconds.replace(",", "")) == pytest.approx(seconds * 1e3, abs=0.06, rel=0.01)
    assert float(of_cpu.strip(" %")) > 0
