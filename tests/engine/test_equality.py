"""Greedy fp32 tokens equal transformers' `generate`, in every strategy and architecture."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from core.errors import ConfigurationError
from engine import LLM, SamplingParams
from engine.attention.backends import CpuBackend
from engine.attention.call import UnsupportedModelError
from engine.loading.transformers_attention import paged_attention_forward
from engine.model.families import FAMILIES
from kernels.cpu.shared_library import unavailable_reason
from tests.engine.greedy_answers import NUM_NEW, STRATEGIES, generate, tokens
from tests.engine.tiny_models import FOREIGN, LIBRARY, OWN

SMALL_POOLS = {
    "mistral": 8, "ministral": 8, "qwen2": 12, "gemma2": 11, "gemma3_text": 11, "olmo3": 10,
    "exaone4": 10, "starcoder2": 8, "cohere2": 10, "qwen2_moe": 12, "mellum": 11, "gpt_oss": 11,
    "cohere2_moe": 10, "phimoe": 8, "dots1": 12, "ministral3": 8, "exaone_moe": 10, "afmoe": 8,
    "gemma4_text": 10, "gemma4_unified_text": 10,
}  # fmt: skip
"""Blocks with which `paged` has to preempt, although it frees those that left a window."""


def test_every_family_is_tested():
    assert OWN.keys() == FAMILIES.keys()


@pytest.mark.matrix
@pytest.mark.parametrize("batching", STRATEGIES)
@pytest.mark.parametrize("architecture", [*OWN, *FOREIGN])
def test_packed_executor(tiny_model, expected, architecture, batching):
    """Prompts run in chunks of 10 tokens beside decodes, and `paged` preempts."""
    llm = LLM(
        tiny_model(architecture),
        batching=batching,
        executor="packed",
        dtype="fp32",
        block_size=4,
        num_kv_blocks=SMALL_POOLS.get(architecture, 14) if batching == "paged" else 40,
        max_rolling_batch_prefill_tokens=10,
        **STRATEGIES[batching],
    )
    assert llm.facts.decoder.startswith("own" if architecture in OWN else "transformers' code")
    assert tokens(llm, ignore_eos=True) == expected(architecture, eos_token_id=None)
    if batching == "paged":
        assert llm.llm_engine.strategy.num_preemptions > 0
    assert llm.llm_engine.strategy.memory.num_held_blocks == 0


@pytest.mark.matrix(cases=5)
@pytest.mark.parametrize("batching", STRATEGIES)
@pytest.mark.parametrize("architecture", ["gpt_oss", "gemma2", "gemma4_text", "olmo3", "ministral"])
def test_nothing_reads_what_a_window_has_left(tiny_model, expected, architecture, batching):
    """All blocks that are neither held nor cached are NaN before each step."""
    llm = LLM(
        tiny_model(architecture, is_wide=True), batching=batching, dtype="fp32", block_size=4,
        num_kv_blocks=SMALL_POOLS[architecture] if batching == "paged" else 60,
        max_rolling_batch_prefill_tokens=10, **STRATEGIES[batching],
    )  # fmt: skip
    engine = llm.llm_engine
    memory, step, num_freed = engine.strategy.memory, engine.step, []

    def poisoned_step(*arguments):
        held = {b for group in engine.strategy.running for s in group.sequences
                for b in memory.held(s.id)}  # fmt: skip
        free = sorted(set(range(memory.num_blocks)) - held - set(memory.kept_blocks))
        for tensor in engine.executor.passes.cache.blocks:
            tensor[free] = float("nan")
        num_freed.append(any(t.first for ts in memory._tables.values() for t in ts))
        return step(*arguments)

    engine.step = poisoned_step
    assert tokens(llm) == generate(tiny_model(architecture, is_wide=True))
    assert any(num_freed) == (batching == "paged")


@pytest.mark.matrix(cases=12)
@pytest.mark.parametrize("architecture", [*OWN, *FOREIGN])
def test_packed_executor_with_cpu_kernels(tiny_model, architecture):
    path = tiny_model(architecture, is_wide=True)
    llm = LLM(
        path, executor="packed", dtype="fp32", block_size=4, num_kv_blocks=14,
        max_rolling_batch_prefill_tokens=10,
    )  # fmt: skip
    assert tokens(llm) == generate(path)
    assert isinstance(llm.llm_engine.executor.passes.backend, CpuBackend) or unavailable_reason()


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2", "qwen2_moe"])
def test_packed_executor_with_transformers_code(tiny_model, expected, architecture):
    llm = LLM(
        tiny_model(architecture), decoder="transformers", dtype="fp32", block_size=4,
        num_kv_blocks=14, max_rolling_batch_prefill_tokens=10,
    )  # fmt: skip
    reason = "option.decoder=transformers"
    assert llm.facts.decoder == f"transformers' code ({architecture}): {reason}"
    assert tokens(llm) == expected(architecture)


@pytest.mark.matrix
@pytest.mark.parametrize("batching", ["none", "dynamic"])
@pytest.mark.parametrize("architecture", LIBRARY)
def test_library_executor(tiny_model, expected, architecture, batching):
    llm = LLM(tiny_model(architecture), batching=batching, dtype="fp32", **STRATEGIES[batching])
    assert llm.facts.executor == "library"
    assert tokens(llm) == expected(architecture)


@pytest.mark.parametrize("batching", ["none", "dynamic"])
def test_library_executor_with_a_decoder(tiny_model, expected, batching):
    path = tiny_model("llama")
    llm = LLM(path, batching=batching, executor="library", dtype="fp32", **STRATEGIES[batching])
    assert tokens(llm) == expected("llama")


def test_the_library_executor_stops_for_an_aborted_request(tiny_model):
    llm = LLM(tiny_model("llama"), batching="none", executor="library", dtype="fp32")
    engine, count = llm.llm_engine, []

    def abort_at_the_third_token():
        count.append(1)
        if len(count) == 3:
            engine.abort(sequence_id)

    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    sequence_id = engine.add([1, 2, 3], params, now=0.0)
    assert engine.step(0.0, abort_at_the_third_token) == []
    assert len(count) == 3


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("bloom", "it does not use transformers' attention interface"),
        ("gpt_neo", "it has custom attention classes"),
        ("minimax", "it has layers of type linear_attention"),
        ("t5", "it is an encoder-decoder model"),
        ("llama4_text", "it has layers of type chunked_attention"),
    ],
)
def test_the_gate_names_the_reason_and_an_alternative(tiny_model, architecture, reason):
    with pytest.raises(ConfigurationError) as caught:
        LLM(tiny_model(architecture), batching="paged", dtype="fp32")
    assert f"{architecture} cannot run packed: {reason}" in str(caught.value)
    assert "none and dynamic work with this model" in str(caught.value)
    with pytest.raises(ConfigurationError, match=r"option\.executor=packed"):
        LLM(tiny_model(architecture), executor="packed", dtype="fp32")


def test_the_gate_compares_logits(tiny_model, monkeypatch):
    """The model here passes every other check, but its answers would be wrong."""

    def forget_the_past(query, key_cache, value_cache, batch, scratch, **options):
        return query

    monkeypatch.setattr("engine.attention.backends.paged_attention", forget_the_past)
    llm = LLM(tiny_model("llama"), batching="none", dtype="fp32")
    assert llm.facts.executor == "library"
    assert "paged and eager attention give different logits" in llm.facts.executor_reason


@pytest.mark.parametrize("times", [0, 2])
def test_the_gate_counts_calls(tiny_model, monkeypatch, times):
    from transformers.models.llama.modeling_llama import LlamaAttention

    forward = LlamaAttention.forward

    def repeated(self, hidden_states, *args, **keywords):
        result = hidden_states, None
        for _ in range(times):
            result = forward(self, hidden_states, *args, **keywords)
        return result

    monkeypatch.setattr(LlamaAttention, "forward", repeated)
    facts = LLM(tiny_model("llama"), batching="none", dtype="fp32", decoder="transformers").facts
    assert facts.executor == "library"
    assert ("never call" if times == 0 else "exactly once") in facts.executor_reason


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ({"position_bias": torch.zeros(1)}, "its attention takes 'position_bias'"),
        ({"attention_mask": torch.zeros(1)}, "an attention mask of its own"),
        ({"paged": None}, "do not pass keywords on"),
    ],
)
def test_attention_rejects_arguments_it_would_ignore(keywords, reason):
    given = {"attention_mask": None, "paged": object()} | keywords
    tensor = torch.zeros(1, 1, 1, 8)
    with pytest.raises(UnsupportedModelError, match=reason):
        paged_attention_forward(torch.nn.Module(), tensor, tensor, tensor, **given)


def test_the_models_generation_config_does_not_affect_decoding(tiny_model, tmp_path):
    path = shutil.copytree(tiny_model("bloom"), tmp_path / "bloom")
    expected = tokens(LLM(path, dtype="fp32"), ignore_eos=True)
    config = {"num_beams": 4, "repetition_penalty": 3.0, "max_time": 1e-6, "eos_token_id": 0,
              "no_repeat_ngram_size": 1, "pad_token_id": 0}  # fmt: skip
    (path / "generation_config.json").write_text(json.dumps(config))
    llm = LLM(path, dtype="fp32")
    assert llm.facts.executor == "library"
    assert tokens(llm, ignore_eos=True) == expected
    assert {len(tokens) for tokens in expected} == {NUM_NEW}


def test_repetition_penalty_equals_transformers(tiny_model):
    path = tiny_model("llama")
    llm = LLM(path, dtype="fp32")
    assert tokens(llm, repetition_penalty=1.7) == generate(path, repetition_penalty=1.7)
