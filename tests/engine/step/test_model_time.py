"""How long the engine runs the model, and what is left for the host."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest

from engine import LLM, SamplingParams
from engine.serve.host_time import HostTime
from engine.stopwatch import Stopwatch
from tests.clock import Clock

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def test_a_stopwatch_adds_up_its_with_blocks_and_counts_one_that_still_runs() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    for seconds in (2.0, 3.0):
        with watch:
            clock.now += seconds
        clock.now += 10.0
    assert watch.seconds == 5.0
    with watch:
        clock.now += 1.0
        assert watch.seconds == 6.0


def test_a_failed_step_is_counted() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    with suppress(RuntimeError), watch:
        clock.now += 2.0
        raise RuntimeError
    clock.now += 10.0
    assert watch.seconds == 2.0


def test_host_time_is_what_neither_the_model_nor_waiting_takes() -> None:
    clock = Clock()
    model = Stopwatch(clock)
    with model:
        clock.now += 50.0  # the first steps, before the loop starts
    host = HostTime(model, clock)
    clock.now += 0.5  # scheduling
    with model:
        clock.now += 4.0
        assert host.seconds() == 0.5, "a model that still runs does not count"
    clock.now += 0.25  # sending
    with host.idle:
        clock.now += 100.0
    assert host.seconds() == 0.75


@pytest.mark.parametrize(
    "options",
    [{"executor": "packed"}, {"executor": "library", "batching": "dynamic"}],
)
def test_every_executor_times_its_model(tiny_model, options) -> None:
    engine = LLM(tiny_model("llama"), dtype="fp32", **options)
    watch, before = engine.llm_engine.model_time, engine.llm_engine.model_time.seconds
    begin = time.monotonic()
    engine.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    assert 0 < watch.seconds - before < time.monotonic() - begin
