"""Parallel sampling: only `paged` computes the prompt once and shares its blocks."""

from __future__ import annotations

import pytest

from core.configuration.strategy_table import BATCHING_NAMES, STRATEGIES
from core.request import Request
from core.sampling import Finish, SamplingParams
from tests.strategies.fakes import (
    Arrival,
    FakeExecutor,
    drive,
    fail,
    next_token,
    request_of,
    strategy_of,
)


def plans_of(strategy, arrivals):
    plans = []
    record = drive(strategy, arrivals, lambda plan: plans.append(plan) if plan else None)
    return record, plans


def samples(n, num_prompt_tokens=10, max_tokens=6, **params):
    return Arrival(0, num_prompt_tokens, max_tokens, params={"n": n, "ignore_eos": True} | params)


def test_paged_computes_the_prompt_once():
    num_tokens = {}
    for name in BATCHING_NAMES:
        _, plans = plans_of(strategy_of(name), [samples(3)])
        num_tokens[name] = sum(plan.num_tokens for plan in plans)
    alone = 10 + 5
    once = 9 + 3 * 6  # 9 prompt tokens once; per sample, the last one and 5 of the answer
    assert num_tokens == {
        name: once if row.is_paged else 3 * alone for name, row in STRATEGIES.items()
    }


@pytest.mark.parametrize(
    ("num_prompt_tokens", "num_shared", "num_copies"),
    [(1, 0, 0), (4, 0, 2), (5, 1, 0), (6, 1, 2), (9, 2, 0), (12, 2, 2)],
)
def test_samples_share_blocks_and_copy_the_first_they_write_into(
    num_prompt_tokens, num_shared, num_copies
):
    """Blocks have 4 tokens. The last sequence that shares a block keeps it; the others copy it."""
    strategy = strategy_of("paged")
    _, plans = plans_of(strategy, [samples(3, num_prompt_tokens, max_tokens=1)])
    assert [len(plan.moves.copies) for plan in plans if plan.moves] == [num_copies] * bool(
        num_copies
    )
    tables = [chunk.tables[0].blocks for chunk in plans[-1].chunks]
    assert len(tables) == 3
    assert len({table[:num_shared] for table in tables}) == 1
    own = [block for table in tables for block in table[num_shared:]]
    assert len(own) == len(set(own)) == 3


def test_a_preempted_group_stays_within_its_reserved_blocks():
    """When the group is recomputed, its sequences share their prompt again."""
    strategy = strategy_of("paged", num_blocks=18)
    most_shared = []

    def watch(plan):
        tables = [chunk.tables[0].blocks for chunk in plan.chunks] if plan else []
        most_shared.append(sum(map(len, tables)) - len({b for t in tables for b in t}))

    record = drive(strategy, [samples(1, 9, 24), samples(3, 18, 12)], watch)
    assert strategy.num_preemptions > 0
    assert max(most_shared) >= 8, "3 samples share 4 blocks, which saves 2 times 4"
    assert {len(tokens) for tokens in record.tokens.values()} == {24, 12}


def test_samples_that_do_not_fit_together_run_one_by_one():
    """Three times seven blocks, less the shared ones, do not fit into twelve."""
    strategy = strategy_of("paged", num_blocks=12)
    record, _ = plans_of(strategy, [samples(3, 18, 10)])
    assert {len(tokens) for tokens in record.tokens.values()} == {10}
    assert len(record.finish) == 3


@pytest.mark.parametrize("batching", BATCHING_NAMES)
def test_all_best_of_samples_are_output(batching):
    record, _ = plans_of(strategy_of(batching), [samples(2, max_tokens=3, best_of=4)])
    assert {len(tokens) for tokens in record.tokens.values()} == {3}
    assert len(record.finish) == 4


@pytest.mark.parametrize("batching", ["continuous", "paged"])
def test_a_single_sample_can_be_aborted(batching):
    strategy, executor = strategy_of(batching), FakeExecutor(4)
    strategy.add(request_of(samples(3, 5, 8), 0))
    ended = set()
    while strategy.has_work():
        plan = strategy.schedule(0.0)
        result = executor.run(plan)
        outputs = strategy.commit(plan, result)
        if any(output.index == 0 for output in outputs):
            ended |= {output.index for output in outputs if output.finish is not None}
            assert strategy.abort(0, index=0) != (1 in ended)
        strategy.memory.check_integrity()
    assert 0 not in ended


def test_a_single_beam_cannot_be_aborted():
    """Beams are not answers yet."""
    strategy = strategy_of("paged")
    strategy.add(request_of(Arrival(0, 5, 8, params={"num_beams": 3}), 0))
    assert not strategy.abort(0, index=0)
    assert strategy.has_work()
    assert strategy.abort(0)
    assert not strategy.has_work()


def test_a_sample_outlives_its_parent_whose_cached_block_it_shares():
    """After a recompute, the samples share a cached block that holds the end of the prompt and the
    start of the first sample's answer.

    Once the second sample has written its own answer into the block, a request with the tokens of
    the first sample must not find it.
    """
    strategy, executor = strategy_of("paged", max_step_tokens=2), FakeExecutor(4)
    strategy.add(request := request_of(samples(2, 6, 12), 0))
    first, second = request.sequences

    def step():
        plan = strategy.schedule(0.0)
        strategy.commit(plan, executor.run(plan))
        strategy.memory.check_integrity()

    while first.num_generated_tokens < 8:
        step()
    strategy._preempt(strategy.running[0])
    step()
    shared = strategy.memory.held(first.id)[1]
    assert strategy.memory.held(second.id)[1] == shared
    assert second.num_computed_tokens == 5
    strategy.abort(0, index=0)
    step()
    strategy.add(Request(9, first.token_ids, SamplingParams(max_tokens=2)))
    while strategy.has_work():
        step()
    assert second.finish == Finish.LENGTH
    assert second.token_ids[6:] == [
        next_token(second.id, second.token_ids[:end]) for end in range(6, 18)
    ]


def test_a_failed_step_ends_all_samples_with_one_output():
    strategy = strategy_of("continuous", max_sequences=2)
    strategy.add(request_of(samples(3), 0))
    outputs = fail(strategy, strategy.schedule(0.0))
    assert [(output.request_id, output.finish) for output in outputs] == [(0, Finish.ERROR)]
    assert not strategy.has_work(), "the third sample had not even begun"
    assert strategy.memory.num_held_blocks == 0


def test_samples_have_distinct_seeds_and_the_first_has_the_seed_of_the_request():
    def seeds(n, seed=5):
        request = request_of(samples(n, seed=seed), 0)
        return [sequence.params.seed for sequence in request.sequences]

    assert seeds(1) == [5]
    assert seeds(4)[:2] == seeds(2)
    assert len({*seeds(4), *seeds(4, seed=6)}) == 8


@pytest.mark.parametrize("batching", BATCHING_NAMES)
def test_beams_with_states_need_half_as_many_slots_more(batching):
    """Of four beams, two may each be continued by two, which read what no beam may write."""
    search = {"num_beams": 4, "ignore_eos": True}
    arrivals = [Arrival(0, 9, 12, params=search), Arrival(0, 9, 12, params=search)]
    strategy = strategy_of(batching, num_states=6, max_sequences=1, num_blocks=128)
    record = drive(strategy, arrivals)
    assert not record.aborted
    assert record.most_at_once == 4
    assert not strategy.memory.states.slots.held
    too_few = strategy_of(batching, num_states=5, max_sequences=1, num_blocks=128)
    assert drive(too_few, arrivals[:1]).aborted, "it is refused"
