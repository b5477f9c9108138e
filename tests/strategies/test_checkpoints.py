"""Prefixes of models with states: found where a checkpoint of the state was left."""

from __future__ import annotations

from core.request import Request
from core.sampling import SamplingParams
from tests.strategies.fakes import FakeExecutor, check_plan, fail, strategy_of
from tests.strategies.test_prefix import PROMPT, run


def strategy_with(num_checkpoints=4, **settings):
    settings = {"num_states": 4, "max_step_tokens": 32} | settings
    return strategy_of("paged", num_checkpoints=num_checkpoints, **settings)


def answer(strategy, prompt, id, **params):
    """Run one request and return its prompt and its answer."""
    run(strategy, prompt, id, **params)
    return [*prompt, *strategy.executor.answers[id]]


class Executor(FakeExecutor):
    """Remembers the answer to each request."""

    def __init__(self):
        super().__init__(4)
        self.answers = {}

    def run(self, plan):
        result = super().run(plan)
        for id, sampled in result.items():
            self.answers.setdefault(id, []).extend(sampled.token_ids)
        return result


def test_a_prompt_is_found_up_to_its_last_whole_block():
    strategy = strategy_with()
    assert run(strategy, [*PROMPT, 13, 14]) == [14]
    assert run(strategy, [*PROMPT, 15, 16, 17], id=1) == [3]
    assert (strategy.num_prefix_queries, strategy.num_prefix_hits) == (29, 12)
    assert run(strategy, PROMPT, id=2) == [12], "there is no state within the prefix"


def test_without_checkpoints_nothing_is_found():
    strategy = strategy_with(0)
    run(strategy, [*PROMPT, 13])
    assert run(strategy, [*PROMPT, 13], id=1) == [13]


def test_the_next_turn_continues_the_answer_within_its_last_block():
    strategy = strategy_with()
    strategy.executor = Executor()
    conversation = answer(strategy, PROMPT, 0, max_tokens=8)
    assert len(conversation) == 20
    assert run(strategy, [*conversation, 3, 4], id=1) == [3], "all but the answer's last token"
    assert run(strategy, [*conversation, 5], id=2) == [1], "the next turn has its own checkpoint"
    assert run(strategy, [*conversation[:19], 7, 7], id=3) == [13], "it went on in that block"


def test_the_answer_to_a_step_in_flight_is_found_once_that_is_computed():
    """With overlap, an answer ends while the step after it runs."""
    for is_lost in (False, True):
        strategy, executor = strategy_with(), Executor()
        stop = SamplingParams(max_tokens=9, stop_token_ids=tuple(range(23)))
        strategy.add(Request(0, PROMPT, stop))
        first = strategy.schedule(0.0)
        results = executor.run(first)
        second = strategy.schedule(0.0)
        executor.run(second)
        assert strategy.commit(first, results)[0].finish is not None
        if not is_lost:
            strategy.commit(second, {})
        strategy.memory.check_integrity()
        conversation = [*PROMPT, *executor.answers[0][:1], 4]
        strategy.executor = executor
        assert run(strategy, conversation, id=1) == [6 if is_lost else 1]


def test_prompts_that_part_leave_a_checkpoint_there():
    system = [*PROMPT, *PROMPT[:8]]
    strategy = strategy_with()
    run(strategy, [*system, *range(1, 9)])
    assert run(strategy, [*system, *range(11, 20)], id=1) == [29], "they part, and leave a state"
    assert run(strategy, [*system, *range(12, 22)], id=2) == [10]


def test_a_long_prompt_leaves_a_checkpoint_after_every_full_step():
    strategy = strategy_with(max_step_tokens=10)  # that is two whole blocks
    assert run(strategy, [*range(1, 22)] * 2)[:2] == [10, 10]
    assert run(strategy, [*range(1, 22), 9, 9], id=1) == [7], "16 tokens are found"


def test_one_spare_slot_holds_what_three_sequences_begin_with():
    strategy = strategy_with(1, num_states=3, max_sequences=3)
    run(strategy, [*PROMPT, 13])
    for id in range(1, 4):
        strategy.add(Request(id, [*PROMPT, 13 + id], SamplingParams(max_tokens=2)))
    plan = strategy.schedule(0.0)
    check_plan(strategy, plan)
    assert [chunk.start for chunk in plan.chunks] == [12, 12, 12]
    strategy.commit(plan, strategy.executor.run(plan))
    strategy.memory.check_integrity()


def test_samples_fork_from_a_checkpoint():
    strategy = strategy_with(max_sequences=8, num_states=8)
    run(strategy, [*PROMPT, 13])
    assert run(strategy, [*PROMPT, 13], id=1, n=3, max_tokens=3)[0] == 3


def test_a_checkpoint_goes_with_the_last_block_of_its_prefix():
    strategy = strategy_with(num_blocks=7)
    run(strategy, [*PROMPT, 1])
    run(strategy, [2] * 17, id=1)  # five blocks: the empty ones, a tail and a prefix's last one
    assert run(strategy, [*PROMPT, 1], id=2) == [13]


def test_running_sequences_evict_checkpoints():
    strategy = strategy_with(1, num_states=2, max_sequences=2)
    for id in range(4):
        run(strategy, [id + 1] * 5, id)
    assert len(strategy.memory.states.slots.checkpoints) <= 3
    assert run(strategy, [4] * 5, 4) == [1]
    assert run(strategy, [1] * 5, 5) == [5], "the oldest ones are gone"


def strategy_with_host(num_host_checkpoints=3, **settings):
    """Return a strategy with two slots on the device, and four on the host."""
    given = {"num_states": 1, "max_sequences": 1, "num_swap_states": 4} | settings
    return strategy_with(1, num_host_checkpoints=num_host_checkpoints, **given)


def test_evicted_checkpoints_are_found_on_the_host():
    """Each of the prompts leaves two: after its first block, and at the end of its answer."""
    for most, num_found in ((0, 5), (1, 5), (3, 1), (4, 1)):
        strategy = strategy_with_host(most)
        for id in range(3):
            run(strategy, [id + 1] * 5, id)
        assert len(strategy.memory.states.on_device.host.checkpoints) == most
        assert run(strategy, [2] * 5, 4) == [num_found], most
        strategy.memory.check_integrity()


def test_a_checkpoint_on_the_host_serves_several_sequences():
    strategy = strategy_with_host(4, num_states=3, max_sequences=3)
    for id in range(4):
        run(strategy, [id + 1] * 5, id)
    host = strategy.memory.states.on_device.host
    assert host.checkpoints
    for id in range(4, 7):
        strategy.add(Request(id, [1] * 5, SamplingParams(max_tokens=2)))
    plan = strategy.schedule(0.0)
    check_plan(strategy, plan)
    assert [chunk.start for chunk in plan.chunks] == [4, 4, 4]
    assert len({source for source, _ in plan.moves.state_swap_ins}) == 1
    strategy.commit(plan, strategy.executor.run(plan))
    strategy.memory.check_integrity()


def test_a_checkpoint_on_the_host_goes_with_the_last_block_of_its_prefix():
    strategy = strategy_with_host(num_blocks=12)
    for id in range(3):
        run(strategy, [id + 1] * 5, id)
    host = strategy.memory.states.on_device.host
    assert len(host.checkpoints) == 3
    run(strategy, [9] * 40, id=3)
    assert run(strategy, [2] * 5, id=4) == [5]


def test_a_failed_step_leaves_no_checkpoint_on_the_host():
    strategy = strategy_with_host()
    for id in range(2):
        run(strategy, [id + 1] * 5, id)
    host = strategy.memory.states.on_device.host
    strategy.add(Request(2, [3] * 5, SamplingParams(max_tokens=2)))
    plan = strategy.schedule(0.0)
    places = {place for _, place in plan.moves.state_swap_outs}
    assert any(place in host.checkpoints for place in places)
    fail(strategy, plan)
    strategy.memory.check_integrity()
    assert not any(place in host.checkpoints for place in places)


def test_swapped_sequences_take_the_slots_of_checkpoints_on_the_host():
    strategy = strategy_with_host(
        2, num_swap_states=2, num_states=2, max_sequences=2, num_blocks=8, num_swap_blocks=8,
        preemption_mode="swap",
    )  # fmt: skip
    for id in range(3):
        run(strategy, [id + 1] * 5, id)
    host = strategy.memory.states.on_device.host
    assert len(host.checkpoints) == 2
    for id in (3, 4):
        strategy.add(Request(id, [id + 1] * 5, SamplingParams(max_tokens=20, ignore_eos=True)))
    while strategy.num_swaps == 0:
        plan = strategy.schedule(0.0)
        strategy.commit(plan, strategy.executor.run(plan))
        strategy.memory.check_integrity()
    assert len(host.held) + len(host.checkpoints) <= host.count == 2
    while strategy.has_work():
        plan = strategy.schedule(0.0)
        strategy.commit(plan, strategy.executor.run(plan))
        strategy.memory.check_integrity()


def test_a_failed_step_leaves_no_checkpoint():
    strategy = strategy_with()
    strategy.add(Request(0, [*PROMPT, 13], SamplingParams(max_tokens=4)))
    fail(strategy, strategy.schedule(0.0))
    strategy.memory.check_integrity()
    assert run(strategy, [*PROMPT, 13], id=1) == [13]
