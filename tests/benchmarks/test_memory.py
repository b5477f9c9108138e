"""The memory benchmark: its input, its counts, and a run of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.load.lengths import Lengths, read_trace, synthetic_lengths
from benchmarks.memory.usage import make, measure
from core.request import Request
from core.sampling import SamplingParams

ROOT = Path(__file__).resolve().parents[2]


def test_a_trace_is_read_without_requests_that_are_too_long(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16,374,44\nx,4000,1\nx,5,0\nx,7,8\n"
    )
    assert read_trace(path, 9, 2048) == [Lengths(374, 44), Lengths(7, 8)]
    assert read_trace(path, 1, 2048) == [Lengths(374, 44)]
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="no column ContextTokens, GeneratedTokens"):
        read_trace(path, 9, 2048)


def test_synthetic_lengths_are_reproducible():
    assert synthetic_lengths(50, 2048) == synthetic_lengths(50, 2048)
    assert len(synthetic_lengths(50, 2048)) == 50
    assert all(lengths.prompt + lengths.generated <= 300 for lengths in synthetic_lengths(50, 300))


def request(id=0, num_prompt_tokens=32, **params):
    given = SamplingParams(**({"max_tokens": 1, "seed": 0} | params))
    return Request(id, [5] * num_prompt_tokens, given)


def test_slots_and_shared_blocks_are_counted():
    usage = measure(make("continuous", 256, 128), [request()])
    assert (usage.used, usage.used_of_all) == (32 / 128, 32 / 256)
    usage = measure(make("paged", 256, 128), [request(num_prompt_tokens=40)])
    assert usage.used == 40 / 48
    usage = measure(make("paged", 256, 128), [request(num_prompt_tokens=41, n=3)])
    # The first step computes 40 tokens in three blocks. In the second step, the tables of the
    # three samples have nine entries. They share two blocks, and each has a third block of its own.
    assert usage.shared == 1 - (3 + 5) / (3 + 9)


def test_the_benchmark_runs_without_a_trace(tmp_path):
    out = tmp_path / "memory.json"
    command = [sys.executable, "-m", "benchmarks.memory", "--requests", "60", "--tokens", "2048",
               "--max-length", "256", "--system-prompt", "64", "--out", str(out)]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    rows = json.loads(out.read_text())["rows"]
    assert [row["what"] for row in rows] == [
        line[:46].rstrip() for line in done.stdout.splitlines()[2:]
    ]
    value = {row["what"]: row["value"] for row in rows}
    assert value["reserved slots used, paged"] > 0.9 > value["reserved slots used, Orca (Max)"]
    assert value["blocks saved by sharing, 2 samples"] > 0
    assert value["blocks saved by sharing, 6 beams"] > value["blocks saved by sharing, 2 beams"]
    assert value["computed tokens saved, 64-token prefix"] > 0
