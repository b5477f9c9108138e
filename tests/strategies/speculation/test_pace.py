"""Steps are timed in operation, and drafts that cost more than at the start are left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from strategies.speculation.costs import StepCosts
from strategies.speculation.pace import COMPARED, MOST, WEIGHT, Pace, TimedStep
from strategies.speculation.policy import Candidate, History, Policy

COSTS = StepCosts(plain=(0.0, *[1.0] * 8), drafted=(0.0, *[1.0] * 40), width=6)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def steps(pace, clock, seconds, count=60, *, num_drafts=8, ahead=(False, False), compared=False):
    for _ in range(count):
        pace.begin(TimedStep(4, num_drafts, 1.0, clock.now, ahead[0], compared))
        clock.now += seconds
        counted = pace.end(is_ahead=ahead[1])
        assert counted == (pytest.approx(seconds) if ahead[0] == ahead[1] else None)


def paces(pace, num_decodes=4):
    """Return those of steps without drafts, and with eight to fifteen."""
    return pace.of(num_decodes)[0:5:4]


def test_what_steps_take_is_learned_apart_for_those_with_drafts():
    clock = Clock()
    pace = Pace(clock)
    steps(pace, clock, 2.0)
    steps(pace, clock, 0.8, num_drafts=0, ahead=(True, True))
    assert paces(pace) == pytest.approx([0.8, 2.0], abs=0.1)
    assert paces(pace, 7) == paces(pace), "of four to seven sequences"
    assert paces(pace, 8) == [1.0, 1.0]


def test_steps_with_few_drafts_and_with_many_are_corrected_apart():
    clock = Clock()
    policy = Policy(COSTS, clock)
    candidates = [Candidate((1, 2), 8, 0, History(), 100, is_greedy=True) for _ in range(4)]
    steps(policy.pace, clock, 3.0, num_drafts=8)
    assert policy.pace.of(4) == pytest.approx([1.0] + [3.0] * 9, abs=0.1)
    assert policy.counts(4, candidates, 8) == [0] * 4
    steps(policy.pace, clock, 1.2, num_drafts=4)
    few, many = policy.pace.of(4)[1:4], policy.pace.of(4)[4:]
    assert few == pytest.approx([1.2] * 3, abs=0.1)
    assert 1.5 < min(many) == max(many) < 2.5, "it is forgotten in time"
    assert policy.counts(4, candidates, 8) == [2, 2, 2, 1]


@pytest.mark.parametrize("ahead", [(True, False), (False, True)])
def test_steps_that_begin_or_end_to_overlap_do_not_count(ahead):
    clock = Clock()
    pace = Pace(clock)
    steps(pace, clock, 2.0, ahead=ahead)
    assert paces(pace) == [1.0, 1.0]


def test_what_is_not_a_steps_time_does_not_count():
    clock = Clock()
    pace = Pace(clock)
    pace.begin(TimedStep(4, 0, 1.0, clock.now, is_ahead=False))
    pace.drop()
    clock.now += 3.0
    assert pace.end(is_ahead=False) is None
    assert paces(pace) == [1.0, 1.0]
    steps(pace, clock, 1000.0, count=1)
    assert paces(pace)[1] == pytest.approx(1 + WEIGHT * (MOST - 1))
    untimed = Pace(None)
    untimed.begin(TimedStep(4, 0, 1.0, clock.now, is_ahead=False))
    assert untimed.end(is_ahead=False) is None
    assert paces(untimed) == [1.0, 1.0]


def test_what_a_draft_models_passes_take_is_learned_apart():
    """A pass for each draft costs a tenth of a step, and takes as long as a step."""
    costs, clock = replace(COSTS, per_pass=0.1), Clock()
    policy = Policy(costs, clock)
    candidates = [Candidate((1, 2), 8, 0, History(), 100, is_greedy=True) for _ in range(4)]
    steps(policy.pace, clock, 1.2, num_drafts=0)
    assert policy.pace.of_passes(4) == policy.pace.of(4)[0], "as long as none was timed"
    assert policy.counts(4, candidates, 8) == [2] * 4
    for _ in range(150):
        policy.completed(4, 2.0)
    assert policy.pace.of_passes(4) == pytest.approx(10.0, abs=0.2)
    assert policy.counts(4, candidates, 8) == [0] * 4
    steps(policy.pace, clock, 1.2, count=20)
    assert policy.pace.of_passes(4) == pytest.approx(10.0, abs=0.2)
    steps(policy.pace, clock, 1.2, count=5000, num_drafts=0)
    assert policy.pace.of_passes(4) < 2.5, "it is forgotten in time"
    assert policy.pace.of_passes(8) == 1.0


def test_slow_steps_with_drafts_are_forgotten_in_time():
    clock = Clock()
    pace = Pace(clock)
    steps(pace, clock, 3.0)
    steps(pace, clock, 1.0, count=5000, num_drafts=0)
    assert paces(pace) == pytest.approx([1.0, 1.2], abs=0.1)


def test_what_a_step_without_drafts_takes_is_not_forgotten_and_is_soon_known_better():
    clock = Clock()
    pace = Pace(clock)
    steps(pace, clock, 1.4, num_drafts=0)
    steps(pace, clock, 2.0, count=500)
    assert paces(pace)[0] == pytest.approx(1.4, abs=0.01)
    steps(pace, clock, 1.2, num_drafts=0, count=1, compared=True)
    assert paces(pace)[0] == pytest.approx(1.4 - COMPARED * 0.2, abs=0.01)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("measured", [1.0, 1.6], ids=["right", "too slow"])
def test_drafts_do_not_pay_for_ever_by_a_wrong_time_of_steps_without(overlap, measured):
    """A step takes a second, and with a draft of each 1.5; a quarter of them is right.

    Where steps overlap, they cost as much, as half of each is hidden.
    """
    plain, hidden = (0.0, *[2.0] * 8), (1.0,) * 9
    costs = replace(COSTS, drafted=(0.0, *[1.5] * 40))
    if overlap:
        costs = replace(costs, plain=plain, hidden=hidden)
    clock = Clock()
    policy, found, ahead = Policy(costs, clock), [], False
    steps(policy.pace, clock, 1.0, num_drafts=4)
    steps(policy.pace, clock, measured, num_drafts=0)
    for _ in range(1000):
        each = [Candidate((1,), 8, 0, History(20, 60), 0, is_greedy=True) for _ in range(4)]
        counts = policy.counts(4, each, 8)
        found.append(any(counts))
        is_compared = found[-1] and policy.compares(4)
        num_drafts = 0 if is_compared else sum(counts)
        policy.begin(4, num_drafts, clock.now, is_ahead=ahead, is_compared=is_compared)
        clock.now += 1.5 if num_drafts else 1.0
        ahead = overlap and not num_drafts
        policy.pace.end(is_ahead=ahead)
    assert found[0] == (measured > 1), "it seems to pay"
    assert not any(found[150:])


def test_drafts_that_take_too_long_in_operation_are_left_out():
    clock = Clock()
    policy = Policy(COSTS, clock)
    candidates = [Candidate((1, 2), 8, 0, History(), 100, is_greedy=True) for _ in range(4)]
    assert sum(policy.counts(4, candidates, 8)) == 8
    for _ in range(60):
        policy.begin(4, 8, clock.now, is_ahead=False)
        clock.now += 3.0
        policy.pace.end(is_ahead=False)
    assert policy.counts(4, candidates, 8) == [0] * 4
    assert policy.least_worth(4, 8) > 1


def test_a_machine_that_has_become_slower_decides_as_before():
    """Also a draft model's passes, and the second sampling of a step, take longer then."""
    costs = replace(COSTS, plain=(0.0, *[2.0] * 8), draw=0.1, per_draw=0.1, per_pass=0.3)
    clock, found = Clock(), []
    for share in range(0, 20, 2):
        candidates = [
            Candidate((1, 2, 3), 8, 0, History(float(share), 19.0 - share), 0, is_greedy=False)
            for _ in range(4)
        ]
        policy = Policy(costs, clock)
        before = policy.counts(4, candidates, 12)
        steps(policy.pace, clock, 3.0, count=100)
        steps(policy.pace, clock, 3.0, count=100, num_drafts=0)
        assert policy.counts(4, candidates, 12) == before
        found.append(sum(before))
    assert {*found} == {0, 4, 8}


def test_no_more_than_half_of_a_step_is_hidden():
    """A single time of it may be disturbed."""
    costs = StepCosts(plain=(0.0, 1.0, 1.0), drafted=(0.0, 1.0, 1.0), width=2, hidden=(1.5,) * 3)
    assert [costs.of(1), costs.of(2), costs.of(1, 1)] == [0.5, 0.5, 1.0]
