"""Models whose layers keep a state: slots, their sharing, swaps, and what is refused."""

from __future__ import annotations

import pytest
import torch

from core.configuration.options import ExecutionOptions, ModelOptions
from core.errors import ConfigurationError, RequestError
from engine import LLM, SamplingParams
from engine.attention.call import UnsupportedModelError
from engine.group import Group
from engine.loading.open_model import make_source, read_config
from engine.loading.own_decoder import load_own_decoder
from engine.phases import Phases
from strategies.memory.states import StateMemory
from tests.engine.greedy_answers import NUM_NEW, prompts, tokens

OPTIONS = {"dtype": "fp32", "block_size": 4, "max_rolling_batch_prefill_tokens": 10}
MODELS = ["lfm2", "qwen3_5_text", "falcon_h1"]


@pytest.mark.parametrize("architecture", MODELS)
def test_swapped_states_and_freed_ones_full_of_nan(tiny_model, expected, architecture):
    """All slots that no sequence holds are NaN before each step."""
    llm = LLM(
        tiny_model(architecture), batching="paged", num_kv_blocks=12, preemption_mode="swap",
        **OPTIONS,
    )  # fmt: skip
    engine = llm.llm_engine
    memory, step = engine.strategy.memory, engine.step
    assert isinstance(memory, StateMemory)

    def poisoned_step(*arguments):
        slots = memory.states.slots
        held = set(slots.held.values())
        free = [slot for slot in range(slots.count) if slot not in held]
        engine.executor.passes.cache.states.rows[free] = 255  # NaN in any float
        return step(*arguments)

    engine.step = poisoned_step
    assert tokens(llm, ignore_eos=True) == expected(architecture, eos_token_id=None)
    assert engine.strategy.num_swaps > 0
    assert not memory.states.slots.held


@pytest.mark.parametrize("architecture", MODELS)
def test_samples_fork_after_their_prompt(tiny_model, expected, architecture):
    llm = LLM(
        tiny_model(architecture), num_kv_blocks=40, max_rolling_batch_size=8, **OPTIONS
    )  # fmt: skip
    params = SamplingParams(n=3, temperature=0, max_tokens=NUM_NEW)
    answers = llm.generate(prompts(), params, use_tqdm=False)
    for answer, tokens_of_one in zip(answers, expected(architecture), strict=True):
        assert [output.token_ids for output in answer.outputs] == [tokens_of_one] * 3
    num_prompt_tokens = sum(map(len, prompts()))
    num_new = sum(len(output.token_ids) for answer in answers for output in answer.outputs)
    assert llm.llm_engine.num_step_tokens < 2 * num_prompt_tokens + num_new


def test_scored_prompts_run_in_parts(tiny_model, monkeypatch):
    """Each part of a chunk reads the state that the part before it has left."""
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0)

    def scores():
        llm = LLM(tiny_model("lfm2"), num_kv_blocks=40, **OPTIONS)
        outputs = llm.generate(prompts(), params, use_tqdm=False)
        return [[next(iter(p.values())).logprob for p in o.prompt_logprobs[1:]] for o in outputs]

    whole = scores()
    monkeypatch.setattr("engine.scores.column.MAX_SCORED_ROWS", 3)
    assert [pytest.approx(row, abs=1e-4) for row in scores()] == whole


@pytest.mark.parametrize("architecture", MODELS)
def test_bits_do_not_depend_on_chunks(tiny_model, architecture):
    def logprobs(step_tokens):
        options = OPTIONS | {"max_rolling_batch_prefill_tokens": step_tokens}
        llm = LLM(tiny_model(architecture, is_wide=True), num_kv_blocks=40, **options)
        params = SamplingParams(temperature=0, max_tokens=6, logprobs=0)
        outputs = llm.generate(prompts(), params, use_tqdm=False)
        return [[next(iter(p.values())).logprob for p in o.outputs[0].logprobs] for o in outputs]

    assert logprobs(100) == logprobs(7)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("falcon_h1", {"mamba_norm_before_gate": False}),
        ("falcon_h1", {"mamba_norm_before_gate": True, "mamba_rms_norm": False}),
        ("nemotron_h", {"moe_latent_size": None}),
        ("nemotron_h", {"layers_block_type": ["linear_attention", "mlp", "full_attention"]}),
    ],
)
def test_other_forms(tiny_model, architecture, changes):
    """The gate compares their logits with transformers'."""
    path = tiny_model(architecture, changes=changes)
    llm = LLM(path, num_kv_blocks=20, decoder="own", **OPTIONS)
    assert llm.facts.decoder == f"own ({architecture})"


@pytest.mark.parametrize("architecture", ["lfm2", "qwen3_5_text", "qwen3_next", "nemotron_h"])
def test_quantized(tiny_model, architecture):
    def answers(step_tokens):
        options = OPTIONS | {"max_rolling_batch_prefill_tokens": step_tokens}
        path = tiny_model(architecture, is_wide=True)
        llm = LLM(path, quantize="int8", num_kv_blocks=40, **options)
        assert llm.facts.decoder == f"own ({architecture})"
        return tokens(llm)

    assert answers(100) == answers(7)


def test_the_start_says_what_a_sequence_keeps(tiny_model):
    llm = LLM(tiny_model("lfm2"), num_kv_blocks=40, max_rolling_batch_size=4, **OPTIONS)
    assert llm.facts.max_sequences == 4
    [note] = (note for note in llm.facts.notes if "state" in note)
    # two layers with two inputs of 32 channels
    assert note.startswith("each sequence keeps a state of 0.5 KiB beside its K and V: 2.0 KiB for")


def test_states_take_at_most_half_of_the_memory(tiny_model):
    llm = LLM(
        tiny_model("lfm2"), kv_cache_memory_bytes=40 * 2**10, dtype="fp32", max_model_len=16,
        max_rolling_batch_size=100,
    )  # fmt: skip
    assert llm.facts.max_sequences == 40
    assert llm.facts.num_kv_blocks * llm.facts.block_size * 2 * 2 * 8 * 4 <= 20 * 2**10
    assert any("batches lowered from 100 to 40" in note for note in llm.facts.notes)


def test_beams_are_refused(tiny_model):
    llm = LLM(tiny_model("lfm2"), num_kv_blocks=40, **OPTIONS)
    with pytest.raises(RequestError, match="has no beam search"):
        llm.generate([[1, 2]], SamplingParams(num_beams=2), use_tqdm=False)


def test_speculation_needs_memory_for_two_states(tiny_model):
    with pytest.raises(ConfigurationError, match="no memory for a second state"):
        LLM(tiny_model("lfm2"), kv_cache_memory_bytes=2000, dtype="fp32", max_model_len=4,
            block_size=4, speculative_method="ngram")  # fmt: skip


def test_several_ranks_are_refused(tiny_model):
    class Ranks(Group):
        def require_one(self, what):
            raise UnsupportedModelError(what)

    path, cpu = tiny_model("lfm2"), torch.device("cpu")
    source = make_source(path, read_config(path, False), ModelOptions(), ExecutionOptions(), cpu)
    with pytest.raises(UnsupportedModelError, match="layers keep a state"):
        load_own_decoder(source, 64, Phases(), Ranks(cpu))
