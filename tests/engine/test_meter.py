"""The engine's metrics of requests and steps."""

from __future__ import annotations

import pytest

from core.output import Output
from core.request import Request
from core.sampling import Finish, SamplingParams
from core.stats import BOUNDS_S, Durations, Timing
from engine.engine import Engine
from engine.serve.meter import Meter, RequestProgress
from engine.tasks.engine import TaskOutput
from engine.tasks.performer import Answer
from tests.engine.test_server import FACTS
from tests.strategies.fakes import FakeExecutor, strategy_of


def output_of(count: int, *, finish: Finish | None = None, index: int = 0) -> Output:
    return Output(0, (7,) * count, (-1.0,) * count, finish, index, admitted=3.0)


@pytest.fixture
def engine():
    return Engine(strategy_of("paged"), FakeExecutor(4), FACTS)


def stats(meter, engine):
    return meter.snapshot(engine)


def test_times_of_a_request(engine):
    meter, progress = Meter(), RequestProgress(arrived=1.0, num_prompt_tokens=5)
    assert meter.record(progress, output_of(1), 4.0) is None
    assert meter.record(progress, output_of(2), 5.0) is None
    timing = meter.record(progress, output_of(1, finish=Finish.LENGTH), 8.0)
    assert timing == Timing(arrived=1.0, admitted=3.0, first_token=4.0, finished=8.0)
    seen = stats(meter, engine)
    assert (seen.num_prompt_tokens, seen.num_generated_tokens) == (5, 4)
    assert (seen.queue.sum_s, seen.prefill.sum_s, seen.decode.sum_s) == (2, 1, 4)
    assert (seen.first_token.sum_s, seen.whole.sum_s) == (3, 7)
    assert (sum(seen.inter_token.counts), seen.inter_token.sum_s) == (3, 4)
    assert seen.finished == {"length": 1}


def test_gaps_are_measured_per_answer(engine):
    meter, progress = Meter(), RequestProgress(1.0, 5)
    for index in (0, 1):
        meter.record(progress, output_of(1, index=index), 4.0 + index)
    meter.record(progress, output_of(1, index=0), 6.0)
    seen = stats(meter, engine)
    assert (seen.inter_token.sum_s, seen.num_prompt_tokens) == (2, 5)


@pytest.mark.parametrize(
    ("outcome", "reason"), [(Answer(b"", "text/plain"), "done"), (RuntimeError("no"), "error")]
)
def test_a_job_has_no_tokens(engine, outcome, reason):
    meter = Meter()
    meter.record_task(RequestProgress(1.0, 0), TaskOutput(0, outcome, admitted=3.0), 8.0)
    seen = stats(meter, engine)
    assert seen.finished == {reason: 1}
    assert (seen.queue.sum_s, seen.whole.sum_s, sum(seen.first_token.counts)) == (2, 7, 0)


def test_failures_are_counted_but_not_timed(engine):
    meter = Meter()
    assert meter.record(RequestProgress(1.0, 5), Output(0, (), (), Finish.ERROR), 4.0) is None
    seen = stats(meter, engine)
    assert seen.finished == {"error": 1}
    assert sum(seen.whole.counts) == 0


def test_snapshots_do_not_change(engine):
    meter = Meter()
    before = stats(meter, engine)
    meter.record(RequestProgress(1.0, 5), output_of(1, finish=Finish.EOS), 4.0)
    assert (before.finished, sum(before.first_token.counts)) == ({}, 0)


def test_a_buckets_bound_is_inclusive():
    durations = Durations()
    durations.add(BOUNDS_S[3])
    durations.add(BOUNDS_S[3] * 1.001)
    durations.add(10 * BOUNDS_S[-1])
    assert [durations.counts[at] for at in (3, 4, -1)] == [1, 1, 1]


@pytest.mark.parametrize("batching", ["none", "dynamic", "continuous", "paged"])
def test_held_and_filled_memory_and_steps(batching):
    """Two requests of 5 + 4 tokens; blocks of 4, and longest sequences of 12 blocks."""
    engine = Engine(strategy_of(batching, max_model_len=48), FakeExecutor(4), FACTS)
    for first in (1, 2):
        engine.add([first, 2, 3, 4, 5], SamplingParams(max_tokens=4, ignore_eos=True), 0.0)
    engine.step(100.0)
    seen = stats(Meter(), engine)
    num_held = {"none": 3, "dynamic": 6, "continuous": 24, "paged": 4}[batching]
    running = 1 if batching == "none" else 2
    assert (seen.num_held_blocks, seen.num_filled_tokens) == (num_held, 5 * running)
    assert (seen.num_running, seen.num_waiting) == (running, 2 - running)
    assert (seen.num_steps, seen.num_step_sequences, seen.num_step_tokens) == (
        1,
        running,
        5 * running,
    )


def test_the_first_admission_counts():
    """A preempted request is admitted again; its queue ended long before."""
    strategy = strategy_of("paged", num_blocks=4)
    requests = [
        Request(at, [1] * 4, SamplingParams(max_tokens=8, ignore_eos=True), arrival=0.0)
        for at in (0, 1)
    ]
    executor, now = FakeExecutor(4), 0.0
    for request in requests:
        strategy.add(request)
    while strategy.has_work():
        now += 1
        plan = strategy.schedule(now)
        outputs = strategy.commit(plan, executor.run(plan))
        assert all(output.admitted == 1.0 for output in outputs)
    assert strategy.num_preemptions > 0
