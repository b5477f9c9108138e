"""Prefix caching does not change the tokens."""

from __future__ import annotations

import pytest

from engine import LLM, SamplingParams
from tests.engine.greedy_answers import prompts

PARAMS = SamplingParams(temperature=0, max_tokens=12)


def turns(llm):
    """Run three requests with each prompt as prefix, one after another."""
    outputs = []
    for prompt in prompts():
        for ending in ([5, 6], [7], [8]):
            [answer] = llm.generate([[*prompt, *prompt, *ending]], PARAMS, use_tqdm=False)
            outputs.append((answer.outputs[0].token_ids, answer.outputs[0].cumulative_logprob))
    return outputs


@pytest.mark.matrix(cases=2)
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt2", "gpt_oss"])
def test_tokens_are_equal_with_and_without_caching(tiny_model, architecture):
    small = {"dtype": "fp32", "block_size": 4, "num_kv_blocks": 30}
    plain = LLM(tiny_model(architecture), enable_prefix_caching=False, **small)
    caching = LLM(tiny_model(architecture), **small)
    for (ids, logprob), (expected_ids, expected) in zip(turns(caching), turns(plain), strict=True):
        assert ids == expected_ids
        assert logprob == pytest.approx(expected, abs=1e-4)
    assert plain.llm_engine.strategy.num_prefix_hits == 0
    hit = caching.llm_engine.strategy.memory._prefixes.hit_tokens
    whole = sum(2 * len(prompt) // hit * hit for prompt in prompts())
    # With windows, the second request shows that the prefix is shared, and the third finds it.
    num_found = 1 if architecture == "gpt_oss" else 2
    assert caching.llm_engine.strategy.num_prefix_hits == num_found * whole
    assert caching.llm_engine.strategy.num_prefix_queries == sum(6 * len(p) + 4 for p in prompts())
