"""Drafts change no answer, lose no block and delay nobody (tests/strategies/fuzz.py)."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from core.request import Request
from core.sampling import SamplingParams
from strategies.speculation.costs import StepCosts
from strategies.speculation.drafts import DraftedChunk
from strategies.speculation.policy import Policy
from strategies.speculation.proposer import NO_PROPOSAL
from tests.strategies.fakes import EOS, strategy_of
from tests.strategies.fuzz import ONE_GROUP, SEVERAL_GROUPS, Executor, Run, fuzz
from tests.strategies.speculation.drafting import Certain, Drafting, Oracle, speculate


class DraftingExecutor(Drafting, Executor):
    pass


class DraftRun(Run):
    def __init__(self, seed: int, counts: Counter[str], groups: Any) -> None:
        super().__init__(seed, counts, groups)
        self.executor.__class__ = DraftingExecutor
        rng = random.Random(seed)
        oracle = Oracle(rng, rng.choice((0.3, 0.8, 1.0)))
        self.speculation = speculate(self.strategy, oracle)

    def _check_end(self) -> None:
        super()._check_end()
        self.counts["draft tokens"] += self.speculation.counts.num_draft_tokens
        self.counts["accepted"] += self.speculation.counts.num_accepted


class DraftRunWithStates(DraftRun):
    """Each draft's state has a slot of its own until it is accepted or not."""

    has_states = True
    num_spare_states = 5


@pytest.mark.parametrize(
    ("kind", "num_seeds"), [(DraftRun, 80), (DraftRunWithStates, 40)], ids=["plain", "states"]
)
def test_random_workloads_with_drafts(kind, num_seeds):
    counts: Counter[str] = Counter()
    groups = [ONE_GROUP, ONE_GROUP, *SEVERAL_GROUPS.values()]
    for seed in range(num_seeds):
        fuzz(seed, counts, groups[seed % len(groups)], kind)
    assert counts["answers"] > 0
    assert counts["preemptions"] > 0
    assert 0.3 < counts["accepted"] / counts["draft tokens"] < 0.9


def request(id: int, max_tokens: int = 20, **params: Any) -> Request:
    return Request(id, [1, 2, 3], SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params),
                   eos_token_ids=[EOS])  # fmt: skip


def drafts(strategy, executor, num_steps=3):
    """Run some steps, and return the drafts of each."""
    found = []
    for now in range(num_steps):
        plan = strategy.schedule(now)
        found += [[len(c.drafts) for c in plan.chunks if isinstance(c, DraftedChunk)]]
        strategy.commit(plan, executor.run(plan))
    return found


def certain(batching="paged", num_draft_tokens=4, **settings):
    """Return a strategy whose drafts are right, and as many as may be."""
    strategy = strategy_of(batching, **settings)
    speculation = speculate(strategy, Certain(), num_draft_tokens)
    return strategy, speculation, Drafting(strategy.memory.layout)


def test_a_prompt_has_no_drafts_and_every_decode_has():
    strategy, speculation, executor = certain()
    strategy.add(request(0))
    assert drafts(strategy, executor) == [[], [4], [4]]
    [group] = strategy.running
    assert group.sequences[0].num_generated_tokens == 1 + 5 + 5
    counts = speculation.counts
    assert (counts.num_drafts, counts.num_draft_tokens) == (2, 8)
    assert counts.accepted[:5] == [2, 2, 2, 2, 0]


def test_drafts_end_before_the_answer_does():
    strategy, _, executor = certain()
    strategy.add(request(0, max_tokens=9))
    assert drafts(strategy, executor, 3) == [[], [4], [2]]
    assert not strategy.has_work()


def test_drafts_take_what_prompts_leave_of_the_budget():
    strategy, _, executor = certain(max_step_tokens=5)
    strategy.add(request(0))
    drafts(strategy, executor, 1)
    strategy.add(request(1))
    assert drafts(strategy, executor, 2) == [[1], [2, 1]]


def test_drafts_preempt_nobody():
    strategy, _, executor = certain(num_blocks=3, max_model_len=12)
    strategy.add(request(0, max_tokens=9))
    strategy.add(request(1, max_tokens=9))
    assert drafts(strategy, executor, 2) == [[], [4]], "one block is free, for one of two"
    assert len(strategy.running) == 2
    assert strategy.num_preemptions == 0


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"no_repeat_ngram_size": 2},
        {"bad_words": ((5,),)},
    ],
    ids=str,
)
def test_parameters_that_look_at_earlier_tokens_have_no_drafts(params):
    strategy, _, executor = certain()
    strategy.add(request(0, **params))
    strategy.add(request(10))
    assert drafts(strategy, executor) == [[], [4], [4]]


class Failing(Certain):
    def begin(self, sequence):
        raise ZeroDivisionError


def test_a_proposer_that_fails_turns_drafts_off_and_ends_nothing(caplog):
    strategy, _, executor = certain()
    strategy.add(request(0))
    speculate(strategy, Failing())
    assert drafts(strategy, executor) == [[], [], []]
    [group] = strategy.running
    assert group.sequences[0].num_generated_tokens == 3
    assert "speculation failed" in caplog.text


class Silent(Certain):
    def begin(self, sequence):
        guesses = super().begin(sequence)
        guesses.propose = lambda count: NO_PROPOSAL
        return guesses


def costs(per_row: float) -> StepCosts:
    """Return costs of steps that take so much longer for each row, beside a second."""
    table = tuple(1 + per_row * count for count in range(60))
    return StepCosts(plain=table, drafted=table, width=5)


def decided(speculation):
    return {decision: count for decision, count in speculation.counts.steps.items() if count}


def test_nothing_is_scheduled_while_drafts_are_in_flight_and_then_steps_overlap_again():
    strategy, speculation, executor = certain()
    for id in range(2):
        strategy.add(request(id, max_tokens=40))
    strategy.commit(plan := strategy.schedule(0), executor.run(plan))
    drafted = strategy.schedule(1)
    assert any(isinstance(chunk, DraftedChunk) for chunk in drafted.chunks)
    strategy.add(request(2, max_tokens=40))
    assert strategy.schedule(2) is None
    strategy.commit(drafted, executor.run(drafted))
    speculation.drafts = lambda chunks: {}
    in_flight = strategy.schedule(3)
    for now in range(4, 8):
        following = strategy.schedule(now)
        assert following is not None
        assert all(chunk.sequence.num_in_flight for chunk in following.chunks)
        strategy.commit(in_flight, executor.run(in_flight))
        in_flight = following


def test_drafts_of_an_aborted_request_keep_nobody_waiting():
    strategy, _, executor = certain()
    strategy.add(request(0))
    strategy.commit(plan := strategy.schedule(0), executor.run(plan))
    assert strategy.schedule(1) is not None
    strategy.add(request(1))
    assert strategy.schedule(2) is None
    strategy.abort(0)
    assert [chunk.sequence.id for chunk in strategy.schedule(3).chunks] == [1]


@pytest.mark.parametrize(
    ("why", "per_row", "oracle", "params", "settings"),
    [
        ("drafted", 0.0, Certain, {}, {}),
        ("cost", 50.0, Certain, {}, {}),
        ("tried", 1.0, Certain, {}, {}),
        ("unlikely", 17.0, Certain, {}, {}),
        ("not_found", 0.0, Silent, {}, {}),
        ("requests", 0.0, Certain, {"presence_penalty": 0.5}, {}),
        ("room", 0.0, Certain, {}, {"max_step_tokens": 1}),
        ("failed", 0.0, Failing, {}, {}),
    ],
)
def test_each_step_says_what_it_decided(why, per_row, oracle, params, settings):
    strategy = strategy_of("paged", **settings)
    speculation = speculate(strategy, oracle())
    speculation.policy = Policy(costs(per_row))
    executor = Drafting(strategy.memory.layout)
    strategy.add(request(0, **params))
    while not decided(speculation):
        drafts(strategy, executor, 1)
    assert decided(speculation) == {why: 1}
    assert speculation.counts.num_decodes == (why != "failed")


@pytest.mark.parametrize(
    ("seconds", "is_model", "expected"),
    [(0.008, False, 90), (0.008, True, 22), (0.025, False, 30), (1.0, False, 1)],
)
def test_deciding_rests_if_it_takes_long_and_finds_nothing(seconds, is_model, expected):
    """A step takes a second, and deciding so many."""
    strategy = strategy_of("paged", num_blocks=200, max_model_len=400)
    speculation = speculate(strategy, proposer := Silent())
    proposer.is_model = is_model
    executor, passed, looks = Drafting(strategy.memory.layout), [0.0], 0
    speculation.policy = Policy(costs(0.0), lambda: sum(passed))

    def decide(chunks):
        nonlocal looks
        looks += 1
        passed.append(seconds)
        return {}

    speculation.drafts = decide
    strategy.add(request(0, max_tokens=300))
    for step in range(290):
        if step == 200:
            looks = 0
        drafts(strategy, executor, 1)
        passed.append(1.0)
    assert looks == expected


def test_what_a_model_reads_is_not_the_time_of_deciding():
    """It reads a prompt in two steps, in five seconds each, before it has drafts."""
    strategy = strategy_of("paged", num_blocks=200, max_model_len=400)
    passed, left = [0.0], [2]

    class Reading(Certain):
        def completed(self, wanted):
            if not left[0]:
                return super().completed(wanted)
            passed.append(5.0)
            left[0] -= 1
            return [() for _ in wanted]

    speculation = speculate(strategy, Reading())
    speculation.policy = Policy(costs(0.0), lambda: sum(passed))
    speculation.policy.compares = lambda num_decodes: False
    executor, found = Drafting(strategy.memory.layout), []
    strategy.add(request(0, max_tokens=300))
    for _ in range(5):
        found += drafts(strategy, executor, 1)
        passed.append(1.0)
    assert found == [[], [], [], [4], [4]]
    assert speculation.policy.pace.of(1)[0] == 1.0, "nor that of the step without drafts"


def test_now_and_then_a_step_has_no_drafts_to_be_timed():
    """A step takes a second, also with drafts; what was measured at the start is half of it."""
    strategy = strategy_of("paged", num_blocks=200, max_model_len=400)
    speculation = speculate(strategy, Certain())
    half = StepCosts(plain=(0.5,) * 60, drafted=(0.55,) * 60, width=5)
    passed = [0.0]
    speculation.policy = Policy(half, lambda: sum(passed))
    executor, found = Drafting(strategy.memory.layout), []
    strategy.add(request(0, max_tokens=350))
    for _ in range(60):
        found += drafts(strategy, executor, 1)
        passed.append(1.0)
    steps = speculation.counts.steps
    assert steps["compared"] == found[1:].count([]) > 0
    assert steps["drafted"] == found.count([4])
    assert speculation.policy.pace.of(1)[0] > 1.0


def test_trials_count_by_what_they_took():
    strategy = strategy_of("paged", num_blocks=200, max_model_len=400)
    speculation = speculate(strategy, Certain())
    passed = [0.0]
    speculation.policy = Policy(costs(1.0), lambda: sum(passed))
    settled = []
    speculation.policy.settle = settled.append
    executor = Drafting(strategy.memory.layout)
    strategy.add(request(0, max_tokens=300))
    for _ in range(3):
        drafts(strategy, executor, 1)
        passed.append(9.0)
    assert speculation.counts.steps["tried"] == 1
    assert settled == [9.0]


def test_deciding_is_part_of_the_time_of_a_step_with_drafts_and_a_models_passes_are_not():
    """A step takes a second, looking for drafts another, and passes of a draft model 0.7 of one."""
    strategy = strategy_of("paged", num_blocks=200, max_model_len=400)
    passed = [0.0]

    class Slow(Certain):
        def begin(self, sequence):
            guesses = super().begin(sequence)
            propose = guesses.propose
            guesses.propose = lambda count: (passed.append(1.0), propose(count))[1]
            return guesses

        def completed(self, wanted):
            passed.append(0.7)
            return super().completed(wanted)

    speculation = speculate(strategy, Slow())
    costly = replace(costs(0.0), per_pass=0.125)
    speculation.policy = Policy(costly, lambda: sum(passed))
    executor = Drafting(strategy.memory.layout)
    strategy.add(request(0, max_tokens=300))
    for _ in range(50):
        drafts(strategy, executor, 1)
        passed.append(1.0)
    assert speculation.policy.pace.of(1)[(5).bit_length()] == pytest.approx(2.0, abs=0.1)
    assert speculation.counts.steps["drafted"] > 30
    assert speculation.policy.pace.of_passes(1) == pytest.approx(0.7 / 0.5, abs=0.05)
