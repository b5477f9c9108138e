"""Sampling: filters, seeds, penalties and frequencies."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from core.sampling import SamplingParams
from core.sequence import Sequence
from engine.sampling.rows import Row
from engine.sampling.sampler import Choices, Sampler
from engine.staging import Staging
from tests.engine.sampling.stages import STAGES


def rows(count, prompt=(1, 2), **params):
    """Return sequences that differ only in their seed."""
    return [Sequence(n, prompt, SamplingParams(seed=n, **params)) for n in range(count)]


def sample(logits, sequences) -> Choices:
    newest = torch.tensor([sequence.token_ids[-1] for sequence in sequences])
    rows = [Row(sequence, len(sequence.token_ids)) for sequence in sequences]
    return Sampler(Staging(torch.device("cpu")), STAGES).sample(logits, rows, lambda: newest)


def drawn(logits, sequences):
    return sample(logits.expand(len(sequences), -1), sequences).token_ids


def test_greedy_returns_the_most_likely_token_with_its_logprob():
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 1.0]])
    choices = sample(logits, rows(2, temperature=0))
    assert choices.token_ids.tolist() == [1, 0]
    expected = logits.log_softmax(-1)[[0, 1], [1, 0]]
    torch.testing.assert_close(choices.logprobs, expected)


def test_frequencies_follow_the_softmax():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    count = drawn(logits, rows(20000, temperature=0.7)).bincount(minlength=4) / 20000
    torch.testing.assert_close(count, (logits / 0.7).softmax(-1), atol=0.012, rtol=0)


def test_top_k_keeps_that_many():
    logits = torch.arange(10.0) / 10
    assert set(drawn(logits, rows(500, top_k=3)).tolist()) == {7, 8, 9}


def test_top_p_keeps_the_smallest_set_with_that_probability():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert set(drawn(logits, rows(500, top_p=0.8)).tolist()) == {0, 1}
    assert set(drawn(logits, rows(500, top_p=0.81)).tolist()) == {0, 1, 2}
    assert set(drawn(logits, rows(200, top_p=1e-6)).tolist()) == {0}


def test_top_p_applies_after_top_k():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert set(drawn(logits, rows(300, top_k=2, top_p=0.57)).tolist()) == {0}


def test_filters_equal_transformers():
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0)) * 2
    kept = TopPLogitsWarper(0.7)(None, TopKLogitsWarper(20)(None, logits / 0.9))
    expected = set(kept[0].isfinite().nonzero()[:, 0].tolist())
    got = drawn(logits[0], rows(8000, temperature=0.9, top_k=20, top_p=0.7))
    assert set(got.tolist()) == expected


def test_the_same_seed_gives_the_same_token_in_any_batch():
    logits = torch.randn(1, 100, generator=torch.Generator().manual_seed(0))
    alone = Sequence(0, [5, 6], SamplingParams(seed=11))
    among = [*rows(7, prompt=(9,), temperature=0.3), Sequence(99, [5, 6], SamplingParams(seed=11))]
    assert drawn(logits[0], [alone])[0] == drawn(logits[0], among)[-1]


def test_position_and_seed_both_matter():
    logits = torch.zeros(1000)
    by_seed = drawn(logits, rows(50))
    by_position = drawn(
        logits, [Sequence(0, [1] * (n + 1), SamplingParams(seed=3)) for n in range(50)]
    )
    assert len(set(by_seed.tolist())) > 40
    assert len(set(by_position.tolist())) > 40


@pytest.mark.parametrize("penalty", [1.5, 0.5])
def test_repetition_penalty(penalty):
    logits = torch.tensor([[2.0, 1.9, -1.0]])
    sequence = Sequence(0, [0, 2], SamplingParams(temperature=0, repetition_penalty=penalty))
    assert sample(logits, [sequence]).token_ids.item() == (1 if penalty > 1 else 0)
    assert logits[0, 0] == 2.0, "the caller's logits are unchanged"


def test_rows_use_only_their_own_parameters():
    logits = torch.tensor([[0.0, 1.0, 5.0]]).expand(3, -1)
    sequences = [
        Sequence(0, [2], SamplingParams(temperature=0)),
        Sequence(1, [2], SamplingParams(temperature=0, repetition_penalty=100.0)),
        Sequence(2, [2], SamplingParams(seed=1, top_k=1)),
    ]
    assert sample(logits, sequences).token_ids.tolist() == [2, 1, 2]


def test_impossible_tokens_are_never_drawn():
    logits = torch.full((6,), float("-inf"))
    logits[2] = 0.0
    assert set(drawn(logits, rows(200)).tolist()) == {2}


def test_rounding_never_selects_a_filtered_token(monkeypatch):
    monkeypatch.setattr("engine.sampling.draw.uniforms", lambda rows: np.ones(len(rows)))
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    assert drawn(logits, rows(1, top_p=0.7)).tolist() == [1]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1e-46},
        {"temperature": 1.1e-5},
        {"temperature": 1e30},
        {"top_p": 1e-50},
        {"repetition_penalty": 0.01, "temperature": 2e-5},
        {"repetition_penalty": 100.0, "top_k": 2**31 - 1},
        {"top_k": 3, "top_p": 1e-50},
        {"min_p": 1.0},
        {"typical_p": 1e-50},
        {"typical_p": 1e-9, "temperature": 1.1e-5},
        {"logit_bias": {3: 1e6, 4: -1e6}},
        {"logit_bias": {3: 1e6}, "temperature": 1.1e-5, "typical_p": 0.5},
        {"bad_words": tuple((token,) for token in range(50))},
        {"presence_penalty": -2.0, "frequency_penalty": -2.0, "temperature": 1e30},
    ],
)
def test_extreme_parameters_give_a_token_and_do_not_affect_other_rows(params):
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0)) * 5
    greedy = Sequence(0, [1], SamplingParams(temperature=0))
    extreme = Sequence(1, [1, 2], SamplingParams(seed=3, **params))
    token_ids = sample(logits, [greedy, extreme]).token_ids.tolist()
    assert token_ids[0] == logits[0].argmax()
    assert 0 <= token_ids[1] < 50


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"top_k": 1},
        {"top_k": 2, "top_p": 0.5},
        {"top_p": 0.5},
        {"min_p": 0.5},
        {"typical_p": 0.5},
        {"repetition_penalty": 2.0, "logit_bias": {1: -1.0}, "logprobs": 2},
    ],
    ids=str,
)
def test_a_row_of_nan_does_not_fail_the_step(bad, params):
    logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(0))
    sequences = rows(3, **params)
    expected = sample(logits, sequences).token_ids
    logits[1] = bad
    choices = sample(logits, sequences)
    assert choices.token_ids[[0, 2]].tolist() == expected[[0, 2]].tolist()
    assert 0 <= choices.token_ids[1] < 9
    assert len(choices.wait()) == 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "params", [{}, {"top_p": 0.5}, {"min_p": 0.5}, {"typical_p": 0.5}], ids=str
)
def test_a_row_without_probabilities_takes_the_highest_logit(bad, params):
    logits = torch.zeros(1, 9)
    logits[0, 4] = bad
    assert sample(logits, rows(1, **params)).token_ids.item() == 4


def test_a_uniform_of_0_selects_the_first_possible_token(monkeypatch):
    monkeypatch.setattr("engine.sampling.draw.uniforms", lambda rows: np.zeros(len(rows)))
    logits = torch.tensor([-torch.inf, -torch.inf, 0.0, 1.0])
    assert drawn(logits, rows(1)).tolist() == [2]


def test_top_logprobs_have_the_requested_number_per_row():
    logits = torch.randn(4, 12, generator=torch.Generator().manual_seed(0))
    counts = [None, 3, 0, 99]
    sequences = [
        Sequence(n, [1], SamplingParams(seed=n, logprobs=count and min(count, 20)))
        for n, count in enumerate(counts)
    ]
    expected = logits.log_softmax(-1)
    results = sample(logits, sequences).wait()
    assert results[0].top_logprobs == ()
    for place, count in ((1, 3), (2, 0), (3, 12)):
        [top], [token_id] = results[place].top_logprobs, results[place].token_ids
        ranked = expected[place].argsort(descending=True).tolist()
        assert top.token_ids == tuple(ranked[:count])
        assert top.logprobs == pytest.approx(expected[place][ranked[:count]].tolist())
        assert top.rank == ranked.index(token_id) + 1
        assert top.logprob == pytest.approx(expected[place, token_id].item())


def test_half_precision_logits_are_unchanged():
    logits = torch.randn(2, 9).bfloat16()
    before = logits.clone()
    sample(logits, rows(2, logit_bias={1: 9.0}, repetition_penalty=3.0, top_k=4, min_p=0.1))
    assert torch.equal(logits, before)


def test_logprobs_are_those_before_sampling_parameters():
    logits = torch.tensor([[2.0, 1.9, -1.0]])
    penalized = Sequence(0, [0], SamplingParams(temperature=0, repetition_penalty=1.5))
    choices = sample(logits, [penalized])
    assert choices.token_ids.item() == 1
    torch.testing.assert_close(choices.logprobs[0], logits.log_softmax(-1)[0, 1])
