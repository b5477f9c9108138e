"""Sequences end once, for the right reason; sampling parameters refuse what makes no sense."""

from __future__ import annotations

import pytest

from core.errors import RequestError
from core.sampling import Finish, Sampled, SamplingParams
from core.sequence import Sequence


def sequence(**params):
    return Sequence(0, [5, 6, 7], SamplingParams(**params), eos_token_ids=[0, 1])


def append(one, *token_ids):
    return one.append(Sampled(token_ids, (0.0,) * len(token_ids)))


def test_a_new_sequence_has_its_prompt_pending():
    one = sequence()
    assert (one.num_pending_tokens, one.num_generated_tokens, one.max_length) == (3, 0, 19)
    one.num_computed_tokens = 3
    append(one, 9)
    assert (one.num_pending_tokens, one.num_generated_tokens) == (1, 1)


@pytest.mark.parametrize(
    ("params", "tokens", "count", "finish"),
    [
        ({}, (9, 1, 8), 2, Finish.EOS),
        ({"ignore_eos": True}, (9, 1, 8), 3, None),
        ({"max_tokens": 2}, (9, 8, 7), 2, Finish.LENGTH),
        ({"max_tokens": 2}, (9, 0), 2, Finish.EOS),
        ({"stop_token_ids": (8,)}, (9, 8, 7), 2, Finish.STOP),
        ({"stop_token_ids": (8,), "ignore_eos": True}, (0, 8), 2, Finish.STOP),
    ],
)
def test_where_it_ends(params, tokens, count, finish):
    one = sequence(**params)
    assert append(one, *tokens) == count
    assert one.finish == finish
    assert one.token_ids[3:] == list(tokens[:count])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("repetition_penalty", 0.0),
        ("seed", -1),
        ("seed", 2**63),
        ("max_tokens", 0),
        ("stop", ("",)),
        ("stop", ""),
    ],
)
def test_values_out_of_range_are_named(field, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field


def test_greedy():
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(top_k=1).is_greedy
    assert not SamplingParams().is_greedy


@pytest.mark.parametrize(
    ("params", "field"),
    [({"n": 0}, "n"), ({"n": 129}, "n"), ({"n": 3, "best_of": 2}, "best_of"),
     ({"best_of": 129}, "best_of")],
)  # fmt: skip
def test_numbers_of_answers_out_of_range_are_named(params, field):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**params)
    assert caught.value.field == field
