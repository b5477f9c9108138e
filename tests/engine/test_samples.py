"""Several answers to one prompt: the same from all strategies, in however little memory."""

from __future__ import annotations

import pytest

from engine import LLM, SamplingParams
from tests.engine.test_equality import STRATEGIES, prompts

NUM_NEW = 8
SMALL = {"dtype": "fp32", "block_size": 4, "max_rolling_batch_prefill_tokens": 10}


def answers(llm, **params):
    sampled = SamplingParams(temperature=0.9, seed=3, max_tokens=NUM_NEW, **params)
    requests = llm.generate(prompts(), sampled, use_tqdm=False)
    assert llm._engine.strategy.memory.num_held_blocks == 0
    return [[output.token_ids for output in each.outputs] for each in requests]


@pytest.fixture(scope="module")
def expected(tiny_model):
    """Each sample alone, by the seed that is its own."""
    return answers(LLM(tiny_model("llama"), batching="none", num_kv_blocks=40, **SMALL), n=3)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("batching", STRATEGIES)
def test_samples_are_the_same_from_all_strategies(tiny_model, expected, batching, overlaps):
    llm = LLM(
        tiny_model("llama"),
        batching=batching,
        async_scheduling=overlaps,
        num_kv_blocks=20 if batching == "paged" else 40,
        **SMALL,
        **STRATEGIES[batching],
    )
    assert answers(llm, n=3) == expected
    if batching == "paged":
        assert llm._engine.strategy.num_preemptions > 0


def test_the_first_sample_is_the_only_one_of_n_1(tiny_model, expected):
    llm = LLM(tiny_model("llama"), num_kv_blocks=40, **SMALL)
    assert [one for [one] in answers(llm)] == [samples[0] for samples in expected]
    assert any(len({tuple(each) for each in samples}) == 3 for samples in expected)


def test_best_of_keeps_the_likeliest(tiny_model, expected):
    llm = LLM(tiny_model("llama"), num_kv_blocks=40, **SMALL)
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=NUM_NEW, n=3)
    requests = llm.generate(prompts(), params, use_tqdm=False)
    best = [
        sorted(each.outputs, key=lambda output: -output.cumulative_logprob)[:2] for each in requests
    ]
    assert answers(llm, n=2, best_of=3) == [[each.token_ids for each in two] for two in best]


def test_a_block_is_copied_in_all_layers(tiny_model):
    """Copies that were left out or half done would give other tokens than `expected`."""
    llm = LLM(tiny_model("llama"), num_kv_blocks=40, **SMALL)
    copied = []
    backend = llm._engine._executor._backend
    original = backend.copy_blocks
    backend.copy_blocks = lambda table, pairs: copied.append(pairs) or original(table, pairs)
    answers(llm, n=3)
    assert copied
