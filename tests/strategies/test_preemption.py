"""Preemption by swap, recompute or auto; priorities; and the effects of a failed plan."""

from __future__ import annotations

import pytest

from core.plan import BlockMoves
from core.sampling import Finish
from tests.strategies.fakes import Arrival, FakeExecutor, drive, fail, request_of, strategy_of

ENDLESS = {"ignore_eos": True}


def crowded(mode, *, num_swap_blocks=40, **changes):
    return strategy_of(
        "paged",
        num_blocks=12,
        max_step_tokens=64,
        preemption_mode=mode,
        num_swap_blocks=num_swap_blocks,
        **changes,
    )


ARRIVALS = [Arrival(0, 7, 24, params=ENDLESS)] * 3


@pytest.mark.parametrize("overlaps", [False, True])
def test_swapped_sequences_are_not_recomputed(overlaps):
    computed = {}
    for mode in ("swap", "recompute"):
        plans, strategy = [], crowded(mode, enable_prefix_caching=False)
        record = drive(strategy, ARRIVALS, lambda p: plans.append(p), overlaps=overlaps)  # noqa: B023
        assert {len(tokens) for tokens in record.tokens.values()} == {24}
        assert strategy.num_preemptions > 0
        assert strategy.num_swaps == (strategy.num_preemptions if mode == "swap" else 0)
        computed[mode] = sum(plan.num_tokens for plan in plans if plan)
    assert computed["swap"] == 3 * (7 + 23), "each token but the last, once"
    assert computed["recompute"] > computed["swap"]


def test_a_recomputed_prompt_is_not_scored_again():
    plans, strategy = [], crowded("recompute", enable_prefix_caching=False)
    scored = Arrival(0, 7, 24, params=ENDLESS | {"prompt_logprobs": 0})
    drive(strategy, [scored] * 3, lambda plan: plans.append(plan) if plan else None)
    assert strategy.num_preemptions > 0
    for id in range(3):
        chunks = [chunk for plan in plans for chunk in plan.chunks if chunk.sequence.id == id]
        assert [place for chunk in chunks for place in chunk.extra_rows] == list(range(6))


def test_a_full_host_pool_falls_back_to_recompute():
    strategy = crowded("swap", num_swap_blocks=3)
    record = drive(strategy, ARRIVALS)
    assert {len(tokens) for tokens in record.tokens.values()} == {24}
    assert strategy.num_preemptions > strategy.num_swaps


@pytest.mark.parametrize(
    ("arrival", "max_step_tokens", "is_swapped"),
    [
        (Arrival(0, 7, 24, params=ENDLESS), 64, False),
        (Arrival(0, 7, 24, params=ENDLESS), 8, True),
        (Arrival(0, 7, 12, params=ENDLESS | {"n": 2}), 64, True),
    ],
)
def test_auto_swaps_sequences_that_are_costly_to_recompute(arrival, max_step_tokens, is_swapped):
    strategy = strategy_of(
        "paged", num_blocks=12, max_step_tokens=max_step_tokens, preemption_mode="auto",
        num_swap_blocks=40,
    )  # fmt: skip
    drive(strategy, [ARRIVALS[0], arrival, arrival])
    assert strategy.num_preemptions > 0
    assert (strategy.num_swaps > 0) == is_swapped


def until_swapped(strategy, executor):
    """Run until a plan swaps out, and return that plan without running it."""
    while True:
        plan = strategy.schedule(0.0)
        if plan.moves.swap_outs:
            return plan
        strategy.commit(plan, executor.run(plan))


def test_a_swapped_out_block_is_reused_in_the_same_plan():
    """No other block is free. Swap-outs must run first, as the same plan writes to their blocks."""
    strategy, executor = crowded("swap", enable_prefix_caching=False), FakeExecutor(4)
    for id in range(3):
        strategy.add(request_of(ARRIVALS[0], id))
    plan = until_swapped(strategy, executor)
    gone = {block for block, _ in plan.moves.swap_outs}
    assert gone & {block for chunk in plan.chunks for block in chunk.tables[0].blocks}
    [victim] = plan.swapped_out
    assert victim.id == 2
    assert [group.request.id for group in strategy.waiting] == [2]


def test_shared_blocks_are_swapped_once_and_stay_shared():
    strategy = crowded("swap")
    most = 0

    def watch(plan):
        nonlocal most
        most = max(most, len(plan.moves.swap_ins) if plan else 0)

    drive(strategy, [ARRIVALS[0], Arrival(0, 16, 6, params=ENDLESS | {"n": 3})], watch)
    assert strategy.num_swaps > 0
    assert 0 < most <= 3 + 3 * 3, "3 blocks that all samples share, and 3 of each sample"


@pytest.mark.parametrize("is_back", [False, True])
def test_sequences_swapped_out_by_a_failed_plan_fail_too(is_back):
    strategy, executor = crowded("swap"), FakeExecutor(4)
    for id in range(3):
        strategy.add(request_of(ARRIVALS[0], id))
    plan = until_swapped(strategy, executor)
    if is_back:
        strategy.abort(0)
        later = strategy.schedule(0.0)
        assert later.moves.swap_ins, "scheduled before the failure is known"
    failed = {output.request_id: output.finish for output in fail(strategy, plan)}
    assert failed[2] == Finish.ERROR
    assert not strategy.has_work()
    strategy.memory.check_integrity()
    assert strategy.memory.num_held_blocks == 0


@pytest.mark.parametrize(("num_blocks", "num_prompt_tokens"), [(11, 13), (12, 18), (13, 17)])
def test_samples_forked_during_the_step_that_finds_a_duplicate_prompt_share_it(
    num_blocks, num_prompt_tokens
):
    """Two clients send the same prompt at once. Its blocks are computed twice and kept once."""
    arrival = Arrival(0, num_prompt_tokens, 12, prompt_seed=1, params=ENDLESS | {"n": 2})
    strategy = strategy_of(
        "paged", num_blocks=num_blocks, max_step_tokens=64, preemption_mode="auto",
        num_swap_blocks=40,
    )  # fmt: skip
    record = drive(strategy, [arrival, arrival], overlaps=True)
    assert {len(tokens) for tokens in record.tokens.values()} == {12}


def test_aborting_swapped_sequences_frees_host_blocks():
    strategy, executor = crowded("swap"), FakeExecutor(4)
    for id in range(3):
        strategy.add(request_of(ARRIVALS[0], id))
    until_swapped(strategy, executor)
    swapped = [id for id in range(3) if strategy.memory.is_swapped(id)]
    assert swapped
    for id in range(3):
        strategy.abort(id)
    assert not any(map(strategy.memory.is_swapped, swapped))
    strategy.memory.check_integrity()
    assert strategy.schedule(0.0) is None


def test_urgent_requests_go_first_and_are_preempted_last():
    strategy = crowded("swap", max_sequences=3)
    urgent = Arrival(5, 7, 24, params=ENDLESS | {"priority": -1})
    order, preempted = [], set()

    def watch(plan):
        order.extend(s.id for chunk in plan.chunks if (s := chunk.sequence).id not in order)
        preempted.update(sequence.id for sequence in plan.swapped_out)

    drive(strategy, [*ARRIVALS, Arrival(1, 7, 24, params=ENDLESS), urgent], watch)
    assert order.index(4) < order.index(3)
    assert preempted
    assert 4 not in preempted


@pytest.mark.parametrize("batching", ["continuous", "paged"])
@pytest.mark.parametrize("priority", [0, -1])
def test_a_long_prompt_does_not_stall_running_streams(batching, priority):
    """Even if the prompt is more urgent, each running sequence gets a token in every step."""
    strategy, executor = strategy_of(batching, max_step_tokens=6), FakeExecutor(4)
    for id in range(2):
        strategy.add(request_of(Arrival(0, 2, 30, params=ENDLESS), id))
    plan = strategy.schedule(0.0)
    strategy.commit(plan, executor.run(plan))
    strategy.add(request_of(Arrival(1, 40, 2, params={"priority": priority}), 2))
    num_long = 0
    while num_long < 40:
        plan = strategy.schedule(1.0)
        assert plan.num_tokens == 6
        outputs = strategy.commit(plan, executor.run(plan))
        assert {0, 1} <= {output.request_id for output in outputs}
        num_long += sum(chunk.length for chunk in plan.chunks if chunk.sequence.id == 2)


def test_empty_block_moves_are_false():
    assert not BlockMoves()
    assert BlockMoves(swap_ins=((0, 0),))
