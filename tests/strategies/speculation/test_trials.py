"""Drafts that are not expected to pay are tried now and then, and are used once they do."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest

from strategies.speculation.costs import StepCosts
from strategies.speculation.policy import Candidate, History, Policy
from strategies.speculation.trials import (
    COMPARISONS,
    FIRST,
    IN_A_ROW,
    MOST,
    SHARE,
    Account,
    Comparisons,
)
from tests.strategies.fakes import strategy_of
from tests.strategies.speculation.drafting import Certain, Drafting, speculate
from tests.strategies.speculation.test_speculation import drafts, request

ROWS = tuple(1.0 + count for count in range(60))
COSTS = StepCosts(plain=ROWS, drafted=ROWS, width=5)
"""Four drafts of each of four sequences make a step 4.2 times as long: at most 1.19 times as many
tokens per second. They lose time if only half of them are right, as is assumed of them at first."""
USERS, DRAFTS = 4, 4


class Users:
    """Sequences whose drafts are right with a probability that may change."""

    def __init__(self, acceptance: float) -> None:
        self.acceptance = acceptance
        self.policy = Policy(COSTS)
        self._histories = [History() for _ in range(USERS)]
        self._rng = random.Random(0)

    def run(self, num_steps: int) -> tuple[float, list[int]]:
        """Return how many times as fast as without drafts it was, and the drafts of each step."""
        taken, tokens, found = 0.0, 0, []
        for _ in range(num_steps):
            counts = self._counts()
            found.append(sum(counts))
            taken += COSTS.of(USERS, found[-1])
            tokens += USERS
            for count, history in zip(counts, self._histories, strict=True):
                accepted = 0
                while accepted < count and self._rng.random() < self.acceptance:
                    accepted += 1
                tokens += accepted
                if count:
                    self.policy.learn(history, 4, accepted, was_rejected=accepted < count)
        return tokens / USERS * COSTS.of(USERS) / taken, found

    def _counts(self) -> list[int]:
        found = [candidate(0, history) for history in self._histories]
        may_try = self.policy.may_try(1)
        counts = self.policy.counts(USERS, found, 64)
        if may_try and not any(counts):
            return self.policy.trial(USERS, found, 64)
        return counts


def candidate(num_unread: int, history: History | None = None) -> Candidate:
    return Candidate(
        (7,) * DRAFTS, 4, 0, history or History(), 0, is_greedy=True, num_unread=num_unread
    )


def test_drafts_that_are_right_are_soon_in_all_steps():
    users = Users(acceptance=1.0)
    _, found = users.run(60)
    assert all(found)
    gain, found = users.run(40)
    assert min(found) == DRAFTS * USERS
    assert gain == pytest.approx(5 / 4.2)


def test_wrong_drafts_take_a_small_share_of_the_time_and_are_tried_for_ever():
    users = Users(acceptance=0.0)
    gain, found = users.run(100)
    assert found[0], "at once"
    assert 1 / gain < 1 + SHARE + FIRST / 100
    gain, found = users.run(10_000)
    assert 1 < 1 / gain < 1 + 1.05 * SHARE
    assert sum(map(bool, found)) > 10


def test_drafts_are_used_again_when_they_have_become_right_again():
    users = Users(acceptance=1.0)
    users.run(60)
    users.acceptance = 0.0
    gain, found = users.run(2000)
    assert gain > 0.98
    assert sum(map(bool, found)) < 20
    users.acceptance = 1.0
    _, found = users.run(1000)
    begin = next(number for number, count in enumerate(found) if count)
    assert all(found[begin:]), "one trial that pays is followed by others"


def test_trials_that_nearly_pay_are_not_in_all_steps():
    account, num_trials = Account(), 0
    for _ in range(1000):
        if account.earn(1) and account.spend(0.3):
            num_trials += 1
            account.give_back(0.28)
    assert num_trials * (0.3 - 0.28) == pytest.approx(IN_A_ROW + 1000 * SHARE, abs=0.3)


def test_trials_that_take_longer_than_they_should_are_fewer():
    account = Account()
    assert account.earn(1)
    assert account.spend(2.0)
    account.correct(5.0)
    num_steps = 1
    while not account.earn(1):
        num_steps += 1
    assert num_steps * SHARE == pytest.approx(2.0 + 5.0 - IN_A_ROW, abs=0.02)
    account.correct(1e6)
    assert account.left == -MOST, "a machine that was asleep does not end all trials"
    account.correct(-1e6)
    assert account.left == MOST


@pytest.mark.parametrize("gain", [1.06, 1.2, 2.0])
@pytest.mark.parametrize("overlap", [False, True])
def test_steps_without_drafts_lose_no_more_than_a_share_where_drafts_pay(gain, overlap):
    comparisons = Comparisons()
    due = [comparisons.is_due(gain, overlap=overlap) for _ in range(4000)]
    lost = sum(due) * (gain - 1)
    assert lost == pytest.approx(COMPARISONS + 4000 * SHARE, rel=0.1)
    assert any(due[:210]), "soon"
    pairs = [second for first, second in pairwise(due[1000:]) if first]
    assert any(pairs) == overlap


@pytest.mark.parametrize(("hidden", "expected"), [(0.0, 9), (0.5, 2)])
def test_a_trial_costs_what_the_step_after_it_cannot_overlap(hidden, expected):
    """A step takes a second; half of one if it overlaps. With drafts it takes one and a half."""
    rows = (1.0,) * 60
    drafted = tuple(1.5 * row for row in rows)
    policy = Policy(StepCosts(plain=rows, drafted=drafted, width=5, hidden=(hidden,)))
    for _ in range(expected):
        assert policy.may_try(1)
        assert policy.trial(USERS, [candidate(0)] * USERS, 64) == [DRAFTS] * USERS
    assert not policy.may_try(1)


def test_the_same_steps_give_the_same_trials():
    (_, first), (_, second) = (Users(acceptance=0.3).run(2000) for _ in range(2))
    assert first == second
    assert 3 < sum(map(bool, first)) < 50


def trial(policy: Policy, *unread: int) -> list[int]:
    found = [candidate(count) for count in unread]
    assert policy.may_try(1)
    assert policy.counts(USERS, found, 64) == [0] * USERS
    return policy.trial(USERS, found, 64)


def saved_up() -> Policy:
    """Return a policy with as much time for trials as may be saved up: 100 s."""
    policy = Policy(StepCosts(plain=ROWS, drafted=ROWS, width=5, per_read=1.0))
    for _ in range(int((MOST - FIRST) / SHARE) + 2):
        assert policy.may_try(1)
    return policy


def test_what_a_model_has_to_read_counts():
    """A step takes 5 s, and one with a trial of all drafts 16 s more. A token is read in 1 s."""
    policy = Policy(saved_up().costs)
    assert trial(policy, 8, 8, 9, 10) == [0] * USERS, "51 s are more than is there at first"
    assert not policy.may_try(1), "no trial is looked for until enough is there"
    assert trial(Policy(saved_up().costs), 8, 8, 9, 8) == [4] * USERS
    assert trial(saved_up(), 20, 20, 20, 20) == [4] * USERS


@pytest.mark.parametrize(("num_left", "expected"), [(1000, 4), (60, 4), (20, 0), (3, 0)])
def test_what_a_model_has_to_read_pays_off_within_the_answer(num_left, expected):
    """A step takes a second, also with drafts; each pass takes a tenth, and to read takes 20 s."""
    costs = StepCosts(plain=(1.0,) * 60, drafted=(1.0,) * 60, width=5, per_pass=0.1, per_read=0.1)
    policy, found = Policy(costs), candidate(200, History(hits=1000.0))
    found.num_left = num_left
    assert policy.counts(1, [found], 64) == [expected]
    assert policy.gain >= 1
    read = candidate(0, History(hits=1000.0))
    read.num_left = num_left
    assert policy.counts(1, [read], 64) == [4], "what was read costs nothing any more"


def test_answers_are_expected_to_become_as_long_as_others_were():
    policy = Policy(COSTS)
    assert policy.mean_length == math.inf
    policy.ended(30)
    assert policy.mean_length == 30
    for _ in range(50):
        policy.ended(80)
    assert policy.mean_length == pytest.approx(80, abs=1)


def test_fewer_sequences_are_tried_if_not_all_ever_can_be():
    """To read all would take 197 s, and no more than 20 s are saved up."""
    rows = tuple(0.5 + 0.175 * count for count in range(60))
    policy = Policy(StepCosts(plain=(1.0,) * 60, drafted=rows, width=5, per_read=1.0))
    for _ in range(int((MOST - FIRST) / SHARE) + 2):
        policy.may_try(1)
    assert trial(policy, 90, 9, 90, 8) == [0, 4, 0, 4]


def test_drafts_that_could_not_pay_are_never_tried():
    policy = Policy(StepCosts(plain=ROWS, drafted=tuple(9 * row for row in ROWS), width=5))
    assert policy.may_try(1)
    assert policy.trial(USERS, [candidate(0)] * USERS, 64) == [0] * USERS


def test_steps_try_drafts_and_then_use_them():
    strategy = strategy_of("paged", max_step_tokens=64)
    speculation = speculate(strategy, Certain())
    speculation.policy = Policy(COSTS)
    executor = Drafting(strategy.memory.layout)
    for id in range(USERS):
        strategy.add(request(id, max_tokens=40))
    first, *later = drafts(strategy, executor, 7)
    assert not first
    assert later[0] == [DRAFTS] * USERS
    assert all(later)
    steps = speculation.counts.steps
    assert min(steps["tried"], steps["drafted"]) > 0
    assert steps["tried"] + steps["drafted"] == 6
