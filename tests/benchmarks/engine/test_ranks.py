"""How `benchmarks.engine.ranks` evaluates its counts."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from benchmarks.engine.ranks import KINDS, Traffic, ranked, report
from core.configuration.options import make_options
from core.errors import ConfigurationError
from tests.container.processes import descendants


def test_totals_are_divided_by_the_steps():
    totals = {kind: Traffic() for kind in KINDS}
    totals["sums"] = Traffic(calls=36, num_bytes=4096, seconds=0.002)
    _, title, head, *rows = report(totals, [0.003, 0.001, 0.002, 0.002], 0.004, 2, 8).splitlines()
    assert "8 sequences on 2 ranks: 2.00 ms (median of 4); on one rank 4.00 ms" in title
    assert head.split() == ["a", "step", "calls", "bytes", "us"]
    assert [row.split()[0] for row in rows] == list(KINDS)
    assert rows[2].split()[1:] == ["9.0", "1,024", "500"]


def test_calls_are_counted_with_their_bytes():
    traffic = Traffic()
    for _ in range(2):
        with traffic.count(10):
            time.sleep(0.01)
    assert (traffic.calls, traffic.num_bytes) == (2, 20)
    assert traffic.seconds >= 0.02
    with pytest.raises(RuntimeError), traffic.count(10):
        raise RuntimeError
    assert traffic.calls == 2, "failed calls do not count"


def test_nothing_is_left_of_ranks_that_cannot_start(monkeypatch):
    before = descendants(os.getpid())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    options = make_options({"device": "cuda"})
    with pytest.raises(ConfigurationError, match=r"rank 1: option\.device=cuda"):  # noqa: SIM117
        with ranked(Path("model"), options, 2, {kind: Traffic() for kind in KINDS}):
            raise AssertionError("the ranks have started")
    assert descendants(os.getpid()) == before
