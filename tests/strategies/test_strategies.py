"""The differences between the strategies: admission, reservation and preemption."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.configuration.strategy_table import BATCHING_NAMES
from core.sampling import Finish, Sampled, SequenceFailure
from tests.strategies.fakes import (
    Arrival,
    FakeExecutor,
    drive,
    next_token,
    request_of,
    requests_of,
    strategy_of,
)


def add(strategy, count, *, num_prompt_tokens=4, max_tokens=8, time=0):
    for id in range(count):
        strategy.add(request_of(Arrival(time, num_prompt_tokens, max_tokens), id))


def ids(plan):
    return [chunk.sequence.id for chunk in plan.chunks]


def test_none_runs_one_request_at_a_time():
    record = drive(strategy_of("none"), [Arrival(0, 4, 8)] * 5)
    assert record.most_at_once == 1


def test_dynamic_waits_for_the_batch_to_fill():
    strategy = strategy_of("dynamic", max_sequences=3)
    add(strategy, 2)
    assert strategy.schedule(now=1.0) is None
    assert strategy.wake_at() == 3.0
    strategy.add(request_of(Arrival(1, 4, 8), 2))
    assert ids(strategy.schedule(now=1.5)) == [0, 1, 2]


def test_dynamic_starts_a_partial_batch_after_the_delay():
    strategy = strategy_of("dynamic", max_sequences=3)
    add(strategy, 2)
    assert strategy.schedule(now=2.9) is None
    assert ids(strategy.schedule(now=3.0)) == [0, 1]


def test_dynamic_admits_no_request_until_the_whole_batch_has_ended():
    strategy = strategy_of("dynamic", max_sequences=2)
    strategy.add(request_of(Arrival(0, 2, 1), 0))
    strategy.add(request_of(Arrival(0, 2, 5), 1))
    strategy.add(request_of(Arrival(0, 2, 5), 2))
    executor = FakeExecutor(4)
    plan = strategy.schedule(9.0)
    outputs = strategy.commit(plan, executor.run(plan))
    assert Finish.LENGTH in [output.finish for output in outputs], (
        "a finished sequence is returned at once"
    )
    while strategy.running:
        plan = strategy.schedule(9.0)
        assert ids(plan) == [1]
        strategy.commit(plan, executor.run(plan))
    assert ids(strategy.schedule(9.0)) == [2]


def test_continuous_admits_between_two_steps():
    strategy = strategy_of("continuous")
    add(strategy, 1)
    executor = FakeExecutor(4)
    plan = strategy.schedule(0.0)
    strategy.commit(plan, executor.run(plan))
    strategy.add(request_of(Arrival(0, 4, 8), 1))
    assert ids(strategy.schedule(0.0)) == [0, 1]


def held_after_admission(reservation, num_prompt_tokens, max_tokens):
    strategy = strategy_of("continuous", kv_reservation=reservation)
    add(strategy, 1, num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens)
    strategy.schedule(0.0)
    return strategy.memory.num_held_blocks


def test_continuous_reserves_by_kv_reservation():
    assert held_after_admission("max", 4, 9) == 48 // 4
    assert held_after_admission("pow2", 4, 9) == (4 + 16) // 4
    assert held_after_admission("oracle", 4, 9) == 16 // 4
    assert held_after_admission("pow2", 40, 5) == 48 // 4, "never more than a whole sequence"


def test_continuous_waits_for_memory_that_paged_does_not_need():
    together = {}
    for name in ("continuous", "paged"):
        strategy = strategy_of(name, num_blocks=13)
        add(strategy, 3)
        together[name] = len(strategy.schedule(0.0).chunks)
    assert together == {"continuous": 1, "paged": 3}


def test_paged_allocates_blocks_on_demand():
    strategy = strategy_of("paged")
    add(strategy, 1, num_prompt_tokens=4, max_tokens=8)
    held, executor = [], FakeExecutor(4)
    while strategy.has_work():
        plan = strategy.schedule(0.0)
        held.append(strategy.memory.num_held_blocks)
        # Never EOS, so that the whole length is used.
        result = {id: Sampled((1,), (0.0,)) for id in executor.run(plan)}
        strategy.commit(plan, result)
    assert held == [1, 2, 2, 2, 2, 3, 3, 3]


def test_paged_preempts_the_newest_and_resumes_it_first():
    strategy = strategy_of("paged", num_blocks=12, max_sequences=3, max_step_tokens=64)
    preempted = []

    def watch(plan):
        preempted.extend(
            group.request.id
            for group in strategy.waiting
            if group.sequences[0].num_generated_tokens > 0
        )

    record = drive(strategy, [Arrival(0, 7, 24)] * 3, watch)
    assert strategy.num_preemptions > 0
    assert 0 not in preempted, "the oldest is never preempted"
    for id, tokens in record.tokens.items():
        prompt = request_of(Arrival(0, 7, 24), id).sequences[0].token_ids
        for count, token in enumerate(tokens):
            assert token == next_token(id, prompt + tokens[:count])


def test_paged_admits_only_with_a_spare_block_per_running_sequence():
    """Without a spare block, the next step would preempt the request that this step admits."""
    for num_blocks, admitted in ((5, [0]), (6, [0, 1])):
        strategy, executor = strategy_of("paged", num_blocks=num_blocks), FakeExecutor(4)
        strategy.add(request_of(Arrival(0, 8, 8), 0))
        strategy.commit(plan := strategy.schedule(0.0), executor.run(plan))
        strategy.add(request_of(Arrival(1, 8, 1), 1))
        assert ids(strategy.schedule(1.0)) == admitted, (
            "of five blocks, two are free and one is reserved"
        )


def test_paged_resumes_preempted_requests_before_new_ones():
    strategy, executor = strategy_of("paged", num_blocks=4, max_model_len=16), FakeExecutor(4)
    for id in (0, 1, 2):
        strategy.add(request_of(Arrival(0, 4, 12), id))
    strategy.limits = replace(strategy.limits, max_sequences=2)
    while not strategy.num_preemptions:
        plan = strategy.schedule(0.0)
        # Never EOS, so that both grow until the blocks run out.
        strategy.commit(plan, {id: Sampled((1,), (0.0,)) for id in executor.run(plan)})
    assert [group.request.id for group in strategy.running] == [0]
    assert [group.request.id for group in strategy.waiting] == [1, 2]


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks():
    for name in BATCHING_NAMES:
        strategy = strategy_of(name, max_step_tokens=5)
        add(strategy, 1, num_prompt_tokens=12)
        lengths, executor = [], FakeExecutor(4)
        for _ in range(3):
            plan = strategy.schedule(9.0)
            lengths.append(plan.num_tokens)
            strategy.commit(plan, executor.run(plan))
        assert lengths == [5, 5, 2], name


def test_fail_ends_every_request_of_the_step():
    strategy = strategy_of("paged")
    add(strategy, 2)
    plan = strategy.schedule(0.0)
    strategy.abort(0)
    outputs = strategy.fail(plan, "why")
    assert [(output.request_id, output.finish) for output in outputs] == [(1, Finish.ERROR)]
    assert [output.failure for output in outputs] == ["why"]
    assert strategy.memory.num_held_blocks == 0
    assert not strategy.has_work()


@pytest.mark.parametrize("name", BATCHING_NAMES)
def test_a_failed_sequence_fails_only_its_request(name):
    strategy, executor = strategy_of(name), FakeExecutor(4)
    params = {"n": 2, "ignore_eos": True}
    for request in requests_of([Arrival(0, 4, 8, params=params)] * 2):
        strategy.add(request)
    outputs, num_sampled = [], 0
    while strategy.has_work():
        plan = strategy.schedule(9.0)
        result = dict(executor.run(plan))
        num_sampled += 1 in result
        if num_sampled == 3 and 1 in result:  # the third token of sequence 1
            result[1] = SequenceFailure("no token")
        outputs += strategy.commit(plan, result)
    failed = [output for output in outputs if output.request_id == 0]
    assert (failed[-1].finish, failed[-1].failure) == (Finish.ERROR, "no token")
    assert sum(output.finish == Finish.ERROR for output in failed) == 1
    assert sum(len(output.token_ids) for output in failed if output.index == 1) == 2
    others = [output.finish for output in outputs if output.request_id == 2 and output.finish]
    assert others == [Finish.LENGTH] * 2
    assert strategy.memory.num_held_blocks == 0


def test_aborting_an_unknown_request_is_no_error():
    strategy = strategy_of("paged")
    add(strategy, 1)
    assert strategy.abort(0)
    assert not strategy.abort(0)
    assert not strategy.abort(17)
