"""Latents of prompts are expanded to K and V of every head: when, and with the same tokens."""

from __future__ import annotations

import pytest

from engine import LLM
from engine.attention import expansion
from engine.attention.backends import TorchBackend
from engine.model.latent_attention import is_expanded
from engine.model.spec import LatentSizes
from tests.engine.greedy_answers import STRATEGIES, generate, tokens

DEEPSEEK = LatentSizes(rank=512, rope=64, nope=128, value=128, query_rank=1536)
GLM_FLASH = LatentSizes(rank=512, rope=64, nope=192, value=256, query_rank=768)
MISTRAL = LatentSizes(rank=256, rope=64, nope=64, value=128, query_rank=1024)
EXPANDING = TorchBackend.expanding
LARGE_RANK = {"kv_lora_rank": 64}
"""So large that expanded K and V need no more memory."""


@pytest.mark.parametrize(
    ("sizes", "num_heads", "num_new", "context", "expected"),
    [
        (DEEPSEEK, 16, 2048, 2048, True),
        (DEEPSEEK, 16, 64, 64, True),
        (DEEPSEEK, 16, 1, 2048, False),  # a decode
        (DEEPSEEK, 16, 64, 96, False),  # 4,128 pairs save fewer FLOPs than 32 rows take
        (DEEPSEEK, 16, 96, 128, True),
        (DEEPSEEK, 16, 2048, 4096, True),
        (DEEPSEEK, 16, 2048, 8192, False),  # more memory
        (DEEPSEEK, 1, 2048, 4096, False),  # the row itself is gathered, too
        (GLM_FLASH, 20, 2048, 2048, True),
        (GLM_FLASH, 20, 2048, 4096, False),
        (MISTRAL, 32, 2048, 2048, True),
        (MISTRAL, 32, 2048, 4096, False),
    ],
)
def test_sequences_are_expanded_where_that_takes_fewer_flops_and_no_more_memory(
    sizes, num_heads, num_new, context, expected
):
    rows = -(-context // 16) * 16
    assert is_expanded(sizes, num_heads, num_new, context, rows) == expected


def test_a_few_tokens_in_a_large_block_are_not_expanded():
    assert is_expanded(DEEPSEEK, 16, 16, 16, 16)
    assert not is_expanded(DEEPSEEK, 16, 16, 16, 64)


@pytest.fixture
def steps(monkeypatch):
    """Let torch's backend expand latents as a GPU's does. Collect the expansions of steps."""
    made, make = [], expansion.StepExpansion

    def note(*arguments):
        made.append(make(*arguments))
        return made[-1]

    monkeypatch.setattr(expansion, "StepExpansion", note)
    monkeypatch.setattr(TorchBackend, "expanding", lambda self, dims: TorchBackend())
    monkeypatch.setattr("engine.model.latent_attention.uses_panels", lambda *_: False)
    return made


@pytest.mark.matrix(cases=1)
@pytest.mark.parametrize("batching", sorted(STRATEGIES, key="paged".__ne__))
@pytest.mark.parametrize("architecture", ["deepseek_v3", "mistral4", "youtu"])
def test_tokens_equal_those_of_generate(tiny_model, steps, architecture, batching):
    """Some sequences of a step are expanded and others not, and `paged` preempts. The second time,
    it finds prefixes in its cache."""
    path = tiny_model(architecture, changes=LARGE_RANK)
    llm = LLM(
        path, batching=batching, dtype="fp32", block_size=4, max_rolling_batch_prefill_tokens=10,
        num_kv_blocks=14 if batching == "paged" else 40, **STRATEGIES[batching],
    )  # fmt: skip
    expected = generate(path)
    steps.clear()
    assert tokens(llm) == expected
    assert steps
    strategy = llm.llm_engine.strategy
    if batching == "paged":
        assert strategy.num_preemptions > 0
        assert any(step.others is not None for step in steps)
        assert tokens(llm) == expected
        assert strategy.num_prefix_hits > 0
    assert strategy.memory.num_held_blocks == 0


def test_cpus_expand_nothing(tiny_model, steps, monkeypatch):
    """There, a token has the same bits in a prompt as decoded."""
    monkeypatch.setattr(TorchBackend, "expanding", EXPANDING)
    llm = LLM(tiny_model("deepseek_v3", changes=LARGE_RANK), dtype="fp32")
    tokens(llm)
    assert not steps
