"""The benchmark of decode steps runs, and counts the bytes of the weights."""

from __future__ import annotations

import pytest

from benchmarks.engine.decode import measure


@pytest.mark.matrix(cases=0)
def test_a_row_says_how_many_bytes_a_step_moves(monkeypatch):
    """Two layers, 64 wide, have 73,728 weights, and the head 25,600."""
    monkeypatch.setattr("benchmarks.engine.decode.COPIED", 2**20)
    row = measure("dry", 2, "bf16", None, 1, 2)
    _, shape, count, moved, *figures, _ = row.split("|")
    assert (shape.strip(), count.strip()) == ("dry", "2")
    assert float(moved) == pytest.approx(2 * (73728 + 25600) / 1e6, abs=0.06)
    assert all(float(figure.strip(" %").replace(",", "")) > 0 for figure in figures)
