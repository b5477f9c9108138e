"""The host's work per decoding sequence. Python calls are counted, as times are not repeatable."""

from __future__ import annotations

import sys

from benchmarks.engine import host

MAX_CALLS_PER_SEQUENCE = 46


def calls_of_a_step(num_sequences: int) -> int:
    """Count Python calls in a decode step: to schedule it, to make its inputs and to commit it."""
    counts = []

    def profile(frame, event, argument):
        counts[-1] += event == "call"

    def run_step(strategy, inputs):
        counts.append(0)
        sys.setprofile(profile)
        try:
            return run_step_unprofiled(strategy, inputs)
        finally:
            sys.setprofile(None)

    run_step_unprofiled, host.run_step = host.run_step, run_step
    try:
        host.measure(num_sequences, num_steps=4)
    finally:
        host.run_step = run_step_unprofiled
    return min(counts)  # of a step in which no sequence gets a new block


def test_calls_grow_linearly_with_the_sequences():
    small, medium, large = (calls_of_a_step(count) for count in (16, 32, 64))
    per_sequence = (medium - small) / 16
    assert per_sequence <= MAX_CALLS_PER_SEQUENCE
    assert large - medium <= 32 * per_sequence * 1.02


def test_every_part_is_timed(capsys):
    assert host.main(["--sequences", "3", "5", "--steps", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["sequences", *host.PARTS, "all"]
    assert [line.split()[0] for line in lines[3:]] == ["3", "5"]
