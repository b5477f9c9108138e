"""Features beside several cache groups, in small pools that preempt and free windows."""

from __future__ import annotations

import pytest

from engine import LLM, LoRARequest, SamplingParams
from tests.engine.greedy_answers import NUM_NEW, STRATEGIES, generate, prompts, tokens
from tests.engine.lora.adapter_files import adapted_llm, merged, write_adapter

SMALL = {"dtype": "fp32", "block_size": 4, "max_rolling_batch_prefill_tokens": 10}


@pytest.mark.matrix(cases=1)
@pytest.mark.parametrize("architecture", ["gemma3_text", "gemma4_text"])
def test_an_fp8_kv_cache_answers_alike_in_all_strategies(tiny_model, architecture):
    """The cached numbers are the same, whichever blocks they are in."""
    path, answers = tiny_model(architecture, is_wide=True), []
    for batching, options in STRATEGIES.items():
        llm = LLM(
            path, batching=batching, kv_cache_dtype="fp8",
            num_kv_blocks=10 if batching == "paged" else 40, **SMALL, **options,
        )  # fmt: skip
        answers.append(tokens(llm, ignore_eos=True))
        assert llm.facts.kv_dtype == "fp8 e4m3"
        strategy = llm.llm_engine.strategy
        assert len(strategy.memory.layout.groups) > 1
        assert (strategy.num_preemptions > 0) == (batching == "paged")
    assert all(answer == answers[0] for answer in answers)
    assert answers[0] != generate(path, eos_token_id=None), "the cache must really be fp8"


@pytest.mark.matrix
@pytest.mark.parametrize("architecture", ["gemma3_text", "gemma4_text"])
def test_adapters(tiny_model, tmp_path, architecture):
    """Prompts use the adapter and the base model in turn."""
    model = tiny_model(architecture)
    folder = write_adapter(model, tmp_path / "a", rank=3, targets=("q_proj", "k_proj", "down_proj"))
    answers = {"a": generate(merged(model, folder, tmp_path / "m")), None: generate(model)}
    assert answers["a"] != answers[None]
    llm = adapted_llm(model, num_kv_blocks=10, max_rolling_batch_prefill_tokens=10)
    names = ["a", None, "a", "a", None]
    outputs = llm.generate(
        prompts(), SamplingParams(temperature=0, max_tokens=NUM_NEW), use_tqdm=False,
        lora_request=[name and LoRARequest(name, 1, str(folder)) for name in names],
    )  # fmt: skip
    expected = [answers[name][index] for index, name in enumerate(names)]
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert len(llm.llm_engine.strategy.memory.layout.groups) > 1
