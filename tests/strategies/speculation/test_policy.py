"""Which drafts a step verifies, by what it costs and by what was accepted before."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from strategies.speculation.costs import StepCosts, curve
from strategies.speculation.policy import MARGIN, Acceptance, Candidate, History, Policy

TILES = StepCosts(
    width=9,
    plain=tuple(10.0 + 2 * -(-rows // 6) for rows in range(65)),
    drafted=tuple(10.0 + 2 * -(-rows // 6) for rows in range(400)),
)
"""Steps that take as long for 1 as for 6 rows."""
LINEAR = StepCosts(
    width=9, plain=tuple(map(float, range(65))), drafted=tuple(map(float, range(400)))
)
"""Steps that take as long for a draft as for another sequence: none is ever worth it."""
SURE, UNSURE = 40.0, 0.0


def candidate(num_drafts=8, hits=SURE, misses=0.0, **changes) -> Candidate:
    """Return a candidate of a sequence whose drafts have been right or wrong so far."""
    fields = {"match": 4, "num_in_flight": 0, "context": 0, "is_greedy": True} | changes
    return Candidate((7,) * num_drafts, history=History(hits, misses), **fields)


def test_the_last_tile_is_filled():
    assert Policy(TILES).counts(1, [candidate(5)], 99) == [5]
    unsure = candidate(8, hits=0.0, misses=2.0)
    assert Policy(TILES).counts(1, [unsure], 99) == [5], "further drafts in the tile cost nothing"


def test_nothing_is_drafted_where_rows_cost_what_they_bring():
    policy = Policy(LINEAR)
    assert policy.least_worth(3, 256) > 1
    assert policy.counts(3, [candidate()], 99) == [0]
    assert Policy(TILES).least_worth(3, 256) < 0.3
    assert Policy().least_worth(3, 256) == 0


def test_only_sequences_that_repeat_something_have_drafts():
    costs = StepCosts(
        width=9,
        plain=tuple(20.0 + rows / 2 for rows in range(65)),
        drafted=tuple(20.0 + rows / 2 for rows in range(400)),
    )
    candidates = [candidate(hits=UNSURE, misses=9.0) for _ in range(45)]
    candidates += [candidate() for _ in range(5)]
    counts = Policy(costs).counts(50, candidates, 256)
    assert counts[:45] == [0] * 45
    assert min(counts[45:]) > 0


def test_a_step_is_never_expected_to_be_slower_than_without_drafts():
    for seed in range(50):
        rng = random.Random(seed)
        slope = rng.choice((0.05, 0.3, 1.0))
        drafted = tuple(1.0 + slope * rows + rng.random() / 9 for rows in range(400))
        costs = StepCosts(width=9, plain=drafted[:65], drafted=drafted, per_draw=rng.random() / 9)
        candidates = [
            candidate(rng.randint(1, 9), 9 * rng.random(), 9 * rng.random(),
                      match=rng.randint(2, 9), is_greedy=rng.random() < 0.5,
                      num_in_flight=rng.randrange(2))
            for _ in range(rng.randint(1, 20))
        ]  # fmt: skip
        num_decodes = len(candidates) + rng.randrange(5)
        policy = Policy(costs)
        expected = policy._rows(candidates)
        counts = policy.counts(num_decodes, candidates, 64)
        tokens, seconds = float(num_decodes), costs.of(num_decodes, sum(counts))
        for index, (count, each) in enumerate(zip(counts, candidates, strict=True)):
            worths = [worth for worth, of in expected if of == index]
            assert worths == sorted(worths, reverse=True)
            tokens += sum(worths[:count])
            seconds += 0 if each.is_greedy else count * costs.per_draw
        plain = num_decodes / costs.of(num_decodes)
        assert not sum(counts) or tokens / seconds > MARGIN * plain


def test_long_contexts_and_draws_count():
    dear = StepCosts(width=9, plain=TILES.plain, drafted=TILES.drafted, per_key=0.01, context=100)
    assert Policy(dear).counts(1, [candidate(5, context=100)], 99) == [5]
    assert Policy(dear).counts(1, [candidate(5, context=5000)], 99) == [0]
    dear = StepCosts(width=9, plain=TILES.plain, drafted=TILES.drafted, per_draw=20.0)
    assert Policy(dear).counts(1, [candidate(5, is_greedy=False)], 99) == [0]


def test_passes_of_a_draft_model_draw_as_steps_do():
    costs = StepCosts(
        width=9, plain=(), drafted=(), draw=4.0, per_draw=0.5, per_pass=1.0, per_proposal=0.25
    )
    assert costs.proposing(2, 6) == 3.5
    assert costs.proposing(2, 6, is_greedy=False) == 3.5 + 2 * 4.0 + 6 * 0.5
    assert replace(costs, per_pass=0.0, per_proposal=0.0).proposing(2, 6, is_greedy=False) == 0


def test_failures_stop_drafts_until_a_sequence_has_rested():
    steps = tuple(1 + 0.4 * rows for rows in range(20))
    costs = StepCosts(width=9, plain=steps, drafted=steps)
    policy, each = Policy(costs), candidate(3, hits=0.0, match=4)
    assert policy.counts(1, [each], 99)[0] > 0
    for _ in range(3):
        each.history.add(0, was_rejected=True)
    assert policy.counts(1, [each], 99) == [0]
    for _ in range(300):
        policy.counts(1, [each], 99)
    assert policy.counts(1, [each], 99)[0] > 0


def test_a_sequence_that_was_lucky_is_not_preferred_by_much():
    lucky, unlucky = History(), History()
    lucky.add(3, was_rejected=False)
    unlucky.add(0, was_rejected=True)
    acceptance = Acceptance()
    assert acceptance.expected(16, lucky) < acceptance.expected(16, unlucky) + 0.25
    for _ in range(6):
        lucky.add(3, was_rejected=False)
        unlucky.add(0, was_rejected=True)
    assert acceptance.expected(16, lucky) > 0.9
    assert acceptance.expected(16, unlucky) < 0.4


def test_acceptance_is_learned_by_the_length_of_the_match():
    acceptance = Acceptance()
    before = acceptance.expected(2, History())
    assert before < acceptance.expected(4, History()) < acceptance.expected(50, History())
    for _ in range(100):
        acceptance.add(2, 1, was_rejected=True)
    assert acceptance.expected(2, History()) > 0.8
    assert acceptance.expected(3, History()) < 0.1


def test_all_drafts_are_verified_without_costs_within_the_budget():
    policy = Policy()
    assert policy.counts(2, [candidate(5), candidate(5)], 99) == [5, 5]
    assert sum(policy.counts(2, [candidate(5), candidate(5)], 7)) == 7


def test_a_curve_is_even_between_times_and_removes_those_that_were_disturbed():
    assert curve({1: 1.0, 3: 2.0}, 6) == pytest.approx((1.0, 1.0, 1.5, 2.0, 8 / 3, 10 / 3, 4.0))
    assert curve({1: 9.0, 2: 2.0, 4: 3.0}, 4) == pytest.approx((2.0, 2.0, 2.0, 2.5, 3.0))
    assert curve({1: 2.0}, 3) == (2.0, 2.0, 4.0, 6.0)


def test_the_acceptance_from_which_drafts_pay():
    assert TILES.break_even(1, 5) == 0.01
    assert LINEAR.break_even(4, 3) is None
    steep = StepCosts(width=2, plain=(0.0, 1.0), drafted=(0.0, 1.0, 1.5))
    assert steep.break_even(1, 1) == 0.51
    assert steep.of(2, 2) == 3.0


def test_a_step_with_few_drafts_takes_as_long_as_one_of_as_many_sequences():
    costs = StepCosts(
        width=4,
        plain=tuple(map(float, range(65))),
        drafted=tuple(rows / 2 for rows in range(65)),
        mixing=3.0,
    )
    assert costs.of(8) == 8
    assert costs.of(2, 6) == 4, "each sequence has four rows"
    assert costs.of(16, 1) == pytest.approx(17 + 3, rel=0.05)
    assert costs.of(2, 6) < costs.of(4, 4) < costs.of(7, 1)


def test_sequences_beyond_the_limit_cost_as_much_as_those_below_it():
    """A sequence takes 1 here, and a row 2; no step had more than 8 sequences."""
    costs = StepCosts(
        width=4,
        plain=tuple(3.0 * rows for rows in range(9)),
        drafted=tuple(2.25 * rows for rows in range(65)),
    )
    for num_drafts in (4, 8, 16, 24):
        assert costs.of(8, num_drafts) == pytest.approx(8 + 2 * (8 + num_drafts))
    assert costs.of(16) == 48
