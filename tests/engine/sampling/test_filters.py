"""Logit filters keep the same tokens as transformers'. Draws depend on no code path or batch."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from core.sampling import SamplingParams
from core.sequence import Sequence
from engine.sampling import draw, filters
from engine.sampling.rows import Row
from engine.staging import Staging, Upload
from tests.engine.sampling.test_sampler import sample

VOCABULARY = 300


def random_logits(count, seed=0, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, VOCABULARY, generator=generator) * scale


def kept(logits, **params):
    """Return [N, vocabulary] bool: tokens with a non-zero probability."""
    rows = [Row(Sequence(0, [1], SamplingParams(**params)), 1)] * len(logits)
    upload = Upload(Staging(torch.device("cpu")))
    keeps = filters.plan_filters(rows, logits.shape[1], upload)
    upload.send()
    scores = (logits - logits.amax(1, keepdim=True)) / rows[0].params.temperature
    weights = filters.weigh(scores)
    for keep in keeps:
        keep(scores, weights)
    return weights > 0


def transformers_keeps(logits, **params):
    """Apply transformers' filters in our order, which is vLLM's."""
    makers = {
        "temperature": TemperatureLogitsWarper,
        "min_p": MinPLogitsWarper,
        "top_k": TopKLogitsWarper,
        "top_p": TopPLogitsWarper,
        "typical_p": TypicalLogitsWarper,
    }
    chain = LogitsProcessorList(
        [make(params[name]) for name, make in makers.items() if name in params]
    )
    return chain(None, logits).isfinite()


@pytest.mark.parametrize("short_k", [0, filters.MAX_SHORT_K], ids=["sorted", "selected"])
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.7},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 128},
        {"top_k": 10**9},
        {"top_p": 0.05},
        {"top_p": 0.9},
        {"top_p": 0.999},
        {"typical_p": 0.2},
        {"typical_p": 0.9},
        {"top_k": 20, "top_p": 0.7},
        {"min_p": 0.02, "top_p": 0.8},
        {"temperature": 1.4, "min_p": 0.01, "top_k": 30, "top_p": 0.9, "typical_p": 0.6},
    ],
    ids=str,
)
def test_kept_tokens_equal_those_of_transformers(monkeypatch, params, short_k):
    monkeypatch.setattr(filters, "MAX_SHORT_K", short_k)
    logits = random_logits(40, scale=1.5)  # small enough that no probability underflows to 0
    known = {**params, "top_k": min(params["top_k"], VOCABULARY)} if "top_k" in params else params
    got, expected = kept(logits, **params), transformers_keeps(logits, **known)
    assert torch.equal(got, expected)
    assert not got.all() or set(params) == {"temperature"} or params.get("top_k", 0) > VOCABULARY


def test_top_p_applies_after_min_p_and_top_k():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert kept(logits, top_p=0.57).tolist() == [[True, True, False, False]]
    assert kept(logits, top_k=2, top_p=0.57).tolist() == [[True, False, False, False]]
    assert kept(logits, min_p=0.6, top_p=0.57).tolist() == [[True, False, False, False]]


def test_typical_p_may_drop_the_most_likely():
    logits = torch.tensor([[0.4] + [0.6 / 50] * 50]).log()
    keeps = kept(logits, typical_p=0.4)
    assert keeps.tolist() == [[False] + [True] * 50]


@pytest.mark.parametrize(
    "params", [{"top_k": 2}, {"top_p": 0.5}, {"top_k": 3, "top_p": 0.6}], ids=str
)
@pytest.mark.parametrize("short_k", [0, filters.MAX_SHORT_K], ids=["sorted", "selected"])
def test_tied_tokens_are_kept_together(monkeypatch, params, short_k):
    monkeypatch.setattr(filters, "MAX_SHORT_K", short_k)
    logits = torch.tensor([[0.0, 1.0, 2.0, 1.0, -9.0, 1.0]])
    assert kept(logits, **params).tolist() == [[False, True, True, True, False, True]]


def test_nan_and_minus_infinity_have_no_probability():
    weights = filters.weigh(torch.tensor([float("nan"), 0.0, float("-inf")]))
    assert weights.tolist() == [0, filters.WEIGHT_OF_ONE, 0]


def mixed_rows():
    """Return every combination of some values of all filters, with one seed per row."""
    values = itertools.product(
        (0.4, 1.0), (0.0, 0.02), (0, 3, 50, 200), (1.0, 0.8, 0.3), (1.0, 0.7)
    )
    names = ("temperature", "min_p", "top_k", "top_p", "typical_p")
    return [
        Sequence(id, [5], SamplingParams(seed=id, **dict(zip(names, changes, strict=True))))
        for id, changes in enumerate(values)
    ]


@pytest.fixture(params=["spread", "ties", "peaked", "flat"])
def logits(request):
    spread = random_logits(len(mixed_rows()))
    return {
        "spread": spread,
        "ties": spread.round(),
        "peaked": spread * 10,
        "flat": torch.zeros_like(spread),
    }[request.param]


def test_a_row_draws_the_same_token_in_any_batch(logits):
    sequences = mixed_rows()
    together = sample(logits, sequences).token_ids.tolist()
    alone = [
        sample(logits[place : place + 1], [sequence]).token_ids.item()
        for place, sequence in enumerate(sequences)
    ]
    assert together == alone
    assert len(set(together)) > 1


@pytest.mark.parametrize("at_once", [1, 7 * VOCABULARY], ids=["one", "seven"])
@pytest.mark.parametrize("short_k", [0, 10, VOCABULARY])
def test_every_code_path_draws_the_same_token(monkeypatch, logits, short_k, at_once):
    """The code selects or sorts, for all rows at once or in parts."""
    expected = sample(logits, mixed_rows()).token_ids
    monkeypatch.setattr(filters, "MAX_SHORT_K", short_k)
    monkeypatch.setattr(draw, "MAX_SCORES", at_once)
    assert torch.equal(sample(logits, mixed_rows()).token_ids, expected)


def test_rows_without_filters_cost_nothing(monkeypatch):
    """Sorts and selections run only for filters that need them. Plain greedy rows send nothing."""
    sorts = []
    for name in ("sort", "topk", "cumsum_", "exp"):
        method = getattr(torch.Tensor, name)

        def noted(self, *args, name=name, method=method, **keywords):
            sorts.append(name)
            return method(self, *args, **keywords)

        monkeypatch.setattr(torch.Tensor, name, noted)
    monkeypatch.setattr(
        Staging,
        "upload",
        lambda self, arrays, own=Staging.upload: (sorts.append("upload"), own(self, arrays))[1],
    )

    def used(**params):
        sorts.clear()
        sample(random_logits(1), [Sequence(0, [1], SamplingParams(seed=1, **params))])
        return set(sorts)

    assert used(temperature=0, top_p=0.5, min_p=0.1, typical_p=0.5) == set()
    plain = {"upload", "exp", "cumsum_"}
    assert used() == plain
    assert used(min_p=0.1) == plain
    assert used(top_k=5, top_p=0.5) == plain | {"topk"}
    assert used(top_p=0.5) == plain | {"sort"}
    assert used(logprobs=3, temperature=0) == {"upload", "topk"}
