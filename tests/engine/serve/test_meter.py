"""The engine's metrics of requests and steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from core.adapter import Adapted, Adapter
from core.output import Output
from core.part import Feature
from core.protocol.stats import BOUNDS_S, BOUNDS_TOKENS, Durations, Timing
from core.request import Request
from core.sampling import Finish, SamplingParams
from engine.engine import Engine
from engine.lora.adapter_registry import AdapterRegistry
from engine.lora.memory import AdapterMemory
from engine.serve.meter import Meter, RequestProgress
from engine.tasks.engine import TaskOutput
from engine.tasks.performer import Answer
from tests.engine.serve.serving import FACTS
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
    assert (seen.queue.sum, seen.prefill.sum, seen.decode.sum) == (2, 1, 4)
    assert (seen.first_token.sum, seen.end_to_end.sum) == (3, 7)
    assert (sum(seen.inter_token.counts), seen.inter_token.sum) == (3, 4)
    assert seen.finished == {"length": 1}


def test_gaps_are_measured_per_answer(engine):
    meter, progress = Meter(), RequestProgress(1.0, 5)
    for index in (0, 1):
        meter.record(progress, output_of(1, index=index), 4.0 + index)
    meter.record(progress, output_of(1, index=0), 6.0)
    seen = stats(meter, engine)
    assert (seen.inter_token.sum, seen.num_prompt_tokens) == (2, 5)


@pytest.mark.parametrize(
    ("outcome", "reason"), [(Answer(b"", "text/plain"), "stop"), (RuntimeError("no"), "error")]
)
def test_a_job_has_no_tokens(engine, outcome, reason):
    meter = Meter()
    meter.record_result(RequestProgress(1.0, 0), TaskOutput(0, outcome, admitted=3.0), 8.0)
    seen = stats(meter, engine)
    assert seen.finished == {reason: 1}
    assert (seen.queue.sum, seen.end_to_end.sum, sum(seen.first_token.counts)) == (2, 7, 0)


def test_failures_are_counted_but_not_timed(engine):
    meter = Meter()
    assert meter.record(RequestProgress(1.0, 5), Output(0, (), (), Finish.ERROR), 4.0) is None
    seen = stats(meter, engine)
    assert seen.finished == {"error": 1}
    assert sum(seen.end_to_end.counts) == 0


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
    """Two requests have 5 + 4 tokens each.

    Blocks have 4 tokens; the longest sequence has 12 blocks.
    """
    engine = Engine(strategy_of(batching, max_model_len=48), FakeExecutor(4), FACTS)
    for first in (1, 2):
        engine.add([first, 2, 3, 4, 5], SamplingParams(max_tokens=4, ignore_eos=True), 0.0)
    engine.step(100.0)
    seen = stats(Meter(), engine)
    num_held = {"none": 3, "dynamic": 6, "continuous": 24, "paged": 4}[batching]
    running = 1 if batching == "none" else 2
    assert (seen.num_held_blocks, seen.num_filled_tokens) == (num_held, 5 * running)
    assert (seen.num_running, seen.num_waiting) == (running, 2 - running)
    assert batching != "none" or seen.waiting == {"slots": 1}
    assert (seen.num_steps, seen.num_step_sequences) == (1, running)
    assert engine.num_step_tokens == 5 * running


def test_the_first_admission_counts():
    """A preempted request is admitted again, but its time in the queue ended long before."""
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


def answers(meter, progress, *lengths):
    """Record the tokens of several answers, one per second from second 4 on."""
    for index, length in enumerate(lengths):
        for position in range(length):
            meter.record(progress, output_of(1, index=index), 4.0 + position)


def test_histograms_of_a_request(engine):
    """Some histograms get a value for each answer, and others one when the last answer ends."""
    meter, progress = Meter(), RequestProgress(1.0, 5, num_answers=2, max_tokens=300)
    answers(meter, progress, 3, 6)
    meter.record(progress, output_of(1, finish=Finish.LENGTH, index=0), 12.0)
    assert sum(stats(meter, engine).params_n.counts) == 0
    meter.record(progress, output_of(1, finish=Finish.EOS, index=1), 13.0)
    seen = stats(meter, engine)
    assert (seen.prompt_tokens.sum, seen.generation_tokens.sum) == (10, 4 + 7)
    assert (seen.max_generation_tokens.sum, sum(seen.max_generation_tokens.counts)) == (7, 1)
    assert (seen.params_n.sum, seen.params_max_tokens.sum) == (2, 300)
    assert seen.inference.sum == (12 - 3) + (13 - 3)
    assert seen.per_output_token.sum == (12 - 4) / 3 + (13 - 4) / 6
    assert seen.finished == {"length": 1, "stop": 1}


def test_an_answer_that_a_stop_string_cuts_has_ended_well(engine):
    meter, progress = Meter(), RequestProgress(1.0, 5)
    answers(meter, progress, 3)
    meter.record_abort(progress, [0], "stop_string", 8.0)
    seen = stats(meter, engine)
    assert (seen.finished, seen.aborted) == ({"stop": 1}, {})
    assert (seen.end_to_end.sum, seen.generation_tokens.sum, sum(seen.params_n.counts)) == (7, 3, 1)


def test_aborts_are_counted_by_reason_but_not_timed(engine):
    meter = Meter()
    for reason in ("disconnect", "disconnect", "timeout"):
        progress = RequestProgress(1.0, 5, num_answers=2)
        answers(meter, progress, 3, 3)
        meter.record_abort(progress, [0, 1], reason, 8.0)
    seen = stats(meter, engine)
    assert seen.finished == {"abort": 6}
    assert seen.aborted == {"disconnect": 2, "timeout": 1}
    assert sum(seen.end_to_end.counts) == sum(seen.generation_tokens.counts) == 0


def test_refusals_and_steps(engine):
    meter = Meter()
    for counts in ({"invalid": 2}, {"invalid": 1, "overloaded": 4}):
        meter.record_refusals(counts)
    for num_tokens in (512, 3, 3):
        meter.record_step(num_tokens)
    seen = stats(meter, engine)
    assert seen.refused == {"invalid": 3, "overloaded": 4}
    assert (sum(seen.iteration_tokens.counts), seen.iteration_tokens.sum) == (3, 518)
    assert seen.iteration_tokens.counts[BOUNDS_TOKENS.index(5)] == 2


def test_adapters_of_running_and_waiting_requests():
    strategy = strategy_of("none")
    adapters = AdapterRegistry(cast(AdapterMemory, SimpleNamespace(num_slots=3)))
    engine = Engine(strategy, FakeExecutor(4), FACTS, features=(Feature(), adapters))
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    for id, name in enumerate(("b", "a", "b")):
        adapter = Adapter(name, "/src", rank=4, slot=id, digest="", generation=1)
        strategy.add(Request(id, [1, 2], params, parts=(Adapted(adapter),)))
    engine.step(0.0)
    [info] = stats(Meter(), engine).infos
    assert info.name == "vllm:lora_requests_info"
    assert info.labels == {
        "max_lora": "3",
        "running_lora_adapters": "b",
        "waiting_lora_adapters": "a,b",
    }
