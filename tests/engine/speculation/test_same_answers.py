"""Answers with drafts have the same tokens, and the same bits, as without."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch

from benchmarks.speculation.__main__ import GivenProposer
from core.errors import ConfigurationError
from core.process.measured import lines_on
from engine import LLM, LoRARequest, SamplingParams
from engine.ranks.shared_inputs import forward_message, pack, unpack
from engine.serve.meter import Meter
from engine.speculation.column import DraftColumn
from engine.step.packed_executor import PackedExecutor
from kernels.cpu.shared_library import unavailable_reason
from strategies.speculation.policy import Counts
from strategies.speculation.speculation import Speculation
from tests.engine.greedy_answers import STRATEGIES
from tests.engine.lora.adapter_files import write_adapter
from tests.engine.same_bits import values
from tests.engine.step.graphs import add_graphs
from tests.engine.tiny_models import VOCABULARY

if unavailable_reason() is not None:
    pytest.skip("torch's products depend on the batch", allow_module_level=True)

ALWAYS = {"speculation": "always"}
SMALL = {"dtype": "fp32", "block_size": 4, "max_rolling_batch_prefill_tokens": 24}
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0, "min_tokens": 9, "stop_token_ids": (3, 5, 8, 13, 21, 34, 55, 89)},
    {"temperature": 0, "presence_penalty": 0.5},
    {"temperature": 0, "bad_words": ((5,), (6, 7))},
    {"temperature": 0, "no_repeat_ngram_size": 3},
    {"temperature": 0, "prompt_logprobs": 1},
    {"temperature": 0.3, "seed": 4, "n": 3},
    {"temperature": 0.7, "top_p": 0.9, "seed": 7, "logit_bias": {9: 2.0}},
    {"temperature": 0, "allowed_token_ids": (4, 6)},
    {"temperature": 0, "ignore_eos": True, "stop_token_ids": ()},
)


def prompts() -> list[list[int]]:
    """Return prompts of few tokens that repeat, one for each kind of request."""
    rng = random.Random(2)
    runs = [[rng.randrange(3, VOCABULARY) for _ in range(rng.randint(2, 6))] for _ in KINDS]
    return [run * rng.randint(2, 5) for run in runs]


def requests(**common: Any) -> list[SamplingParams]:
    return [SamplingParams(**{"max_tokens": 24, "logprobs": 2, **kind, **common}) for kind in KINDS]


def answers(llm: LLM, **changes: Any) -> list[Any]:
    """Return the tokens and exact log-probabilities of all answers."""
    found = llm.generate(prompts(), requests(), use_tqdm=False, **changes)
    assert llm.llm_engine.strategy.memory.num_held_blocks == 0
    return [
        (values(output), [(o.index, o.token_ids, o.finish_reason) for o in output.outputs])
        for output in found
    ]


def counts(llm: LLM) -> Counts:
    speculation = llm.llm_engine.strategy.extension
    assert isinstance(speculation, Speculation)
    return speculation.counts


@pytest.fixture(scope="module")
def expected(tiny_model):
    """Return a function (architecture) → the answers one by one, without drafts."""

    @cache
    def of(architecture: str) -> Any:
        path = tiny_model(architecture, is_wide=True)
        return answers(LLM(path, batching="none", num_kv_blocks=60, **SMALL))

    return of


@pytest.mark.matrix(cases=4)
@pytest.mark.parametrize("method", ["ngram", "suffix"])
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("batching", STRATEGIES)
def test_all_strategies_answer_the_same(tiny_model, expected, batching, overlaps, method):
    llm = LLM(
        tiny_model("llama", is_wide=True),
        batching=batching,
        async_scheduling=overlaps,
        speculative_method=method,
        speculation="always",
        num_speculative_tokens=4,
        num_kv_blocks=40 if batching == "paged" else 120,
        **SMALL,
        **STRATEGIES[batching],
    )
    assert answers(llm) == expected("llama")
    assert answers(llm) == expected("llama"), "with cached prefixes, and answers to look at"
    assert counts(llm).num_accepted > 20
    assert counts(llm).num_accepted < counts(llm).num_draft_tokens
    if batching == "paged":
        assert llm.llm_engine.strategy.num_preemptions > 0


@pytest.mark.parametrize("overlaps", [False, True])
def test_steps_with_drafts_are_graphs(tiny_model, expected, overlaps):
    """Some fill a graph's size, others are padded. So do those of other ranks."""
    llm = LLM(
        tiny_model("llama", is_wide=True),
        async_scheduling=overlaps,
        speculative_method="ngram",
        num_speculative_tokens=4,
        num_kv_blocks=120,
        **ALWAYS,
        **SMALL,
    )
    add_graphs(llm, max_rows=24, prompt_sizes=(24,), num_drafts=4)
    executor = llm.llm_engine.executor
    assert isinstance(executor, PackedExecutor)
    graphs = executor.passes.graphs
    assert graphs is not None
    replay, used = graphs.replay, []

    def counted(inputs, size):
        rows = [len(one.extra_rows) for one in inputs.columns if one.extra_rows is not None]
        used.append((sum(rows), size.num_extra_rows))
        logits = replay(inputs, size)
        alone = logits.clone()
        message = forward_message(inputs, size)
        replay(unpack(pack(inputs, message), message, []), size)
        assert torch.equal(logits, alone), "another rank, which gets these bytes, does the same"
        return logits

    graphs.replay = counted
    assert answers(llm) == expected("llama")
    assert answers(llm) == expected("llama"), "whatever larger steps left in the buffers"
    drafting = [pair for pair in used if pair[0]]
    assert len(drafting) > 10
    assert {count < size for count, size in drafting} == {True, False}


@pytest.mark.matrix(cases=2)
@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize(
    "architecture", ["gemma2", "gpt_oss", "qwen3_moe", "gemma3_text", "deepseek_v3", "mistral"]
)
def test_families_with_windows_latents_and_experts(tiny_model, expected, architecture, mode):
    llm = LLM(
        tiny_model(architecture, is_wide=True),
        batching="paged",
        preemption_mode=mode,
        speculative_method="ngram",
        speculation="always",
        num_speculative_tokens=8,
        num_kv_blocks=60,
        **SMALL,
    )
    assert answers(llm) == expected(architecture)
    assert counts(llm).num_accepted > 0


@pytest.mark.matrix(cases=2)
@pytest.mark.parametrize(
    "options",
    [
        {"batching": "paged", "preemption_mode": "swap", "async_scheduling": True,
         "num_kv_blocks": 40},
        {"batching": "continuous", "num_kv_blocks": 120},
    ],
    ids=lambda options: options["batching"],
)  # fmt: skip
@pytest.mark.parametrize("architecture", ["qwen3_5_text", "bamba", "lfm2"])
def test_states_are_taken_back(tiny_model, expected, architecture, options):
    llm = LLM(
        tiny_model(architecture, is_wide=True),
        speculative_method="ngram",
        num_speculative_tokens=4,
        max_rolling_batch_size=8,
        **ALWAYS,
        **SMALL,
        **options,
    )
    strategy = llm.llm_engine.strategy
    known = {
        tuple(prompt): outputs[0][1]
        for prompt, (_, outputs) in zip(prompts(), expected(architecture), strict=True)
    }
    assert isinstance(strategy.extension, Speculation)
    strategy.extension.proposer = GivenProposer(known, 0.7, VOCABULARY)
    assert answers(llm) == expected(architecture)
    assert 0.1 < counts(llm).num_accepted / counts(llm).num_draft_tokens < 0.9
    assert strategy.memory.states.num_ahead == 4 * 4, "all spare slots are free"
    if strategy.shares_prompts:
        assert strategy.num_preemptions > 0


def test_adapters_answer_the_same(tiny_model, tmp_path):
    path = tiny_model("llama", is_wide=True)
    adapter = LoRARequest("a", 1, str(write_adapter(path, tmp_path / "adapter")))
    used = [adapter if index % 2 else None for index in range(len(KINDS))]
    plain, drafting = (
        answers(LLM(path, enable_lora=True, **method, **SMALL), lora_request=used)
        for method in ({}, {"speculative_method": "suffix", "speculation": "always"})
    )
    assert drafting == plain


@pytest.mark.parametrize(
    "options", [{"quantize": "int8"}, {"quantize": "int4", "dtype": "bf16"}], ids=["int8", "int4"]
)
def test_quantized_weights_answer_the_same(tiny_model, options):
    path, common = tiny_model("llama", is_wide=True), {**SMALL, **options}
    llm = LLM(path, speculative_method="ngram", num_kv_blocks=120, **ALWAYS, **common)
    assert answers(llm) == answers(LLM(path, batching="none", num_kv_blocks=60, **common))
    assert 10 < counts(llm).num_accepted < counts(llm).num_draft_tokens


def test_a_stop_token_within_accepted_drafts_ends_the_answer_there(tiny_model):
    """All drafts are right, those behind the stop token, too."""
    path, [prompt, *_] = tiny_model("llama", is_wide=True), prompts()
    common = {"max_tokens": 24, "temperature": 1, "seed": 3, "ignore_eos": True}
    plain, llm = LLM(path, **SMALL), LLM(path, speculative_method="ngram", **ALWAYS, **SMALL)
    [output] = plain.generate([prompt], SamplingParams(**common), use_tqdm=False)
    whole = output.outputs[0].token_ids
    speculation = llm.llm_engine.strategy.extension
    assert isinstance(speculation, Speculation)
    speculation.proposer = GivenProposer({tuple(prompt): whole}, 1.0, VOCABULARY)
    places = [place for place in range(1, 14) if whole.index(whole[place]) == place]
    assert len(places) > 6, "at least one is not the last of a run of 1 + 5 tokens"
    for place in places:
        params = SamplingParams(**common, stop_token_ids=(whole[place],))
        before = llm.llm_engine.num_steps
        [output] = llm.generate([prompt], params, use_tqdm=False)
        answer = output.outputs[0]
        assert (answer.token_ids, answer.finish_reason) == (whole[: place + 1], "stop")
        assert llm.llm_engine.num_steps - before < 6, "steps accepted runs"
        assert llm.llm_engine.strategy.memory.num_held_blocks == 0


def test_the_policy_measures_and_answers_the_same(tiny_model, expected, monkeypatch):
    path = tiny_model("llama", is_wide=True)
    llm = LLM(path, speculative_method="ngram", **SMALL)
    assert answers(llm) == expected("llama")
    [note] = [note for note in llm.facts.notes if note.startswith("speculation: ngram")]
    assert "ms; it pays from this share of right tokens on: 1 sequence " in note
    speculation = llm.llm_engine.strategy.extension
    assert isinstance(speculation, Speculation)
    costs = speculation.policy.costs
    assert costs is not None
    assert (len(costs.drafted), len(costs.plain)) == (1 + 24, 1 + 24)
    assert 0 < costs.plain[1] <= costs.plain[24]

    def measure(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr("engine.speculation.start.measure_costs", measure)
    again = LLM(path, speculative_method="suffix", **SMALL)
    extension = again.llm_engine.strategy.extension
    assert isinstance(extension, Speculation)
    assert extension.policy.costs == costs, "an earlier start has measured them"
    assert any("(measured at an earlier start, " in note for note in again.facts.notes)
    lines = [*lines_on(path)]
    [place] = [number for number, line in enumerate(lines) if line.endswith(note)]
    row = next(line for line in lines[place:] if line.startswith("  ms without drafts"))
    assert f"{1000 * costs.plain[24]:.2f}" in row.split()
    for changes in ({"num_speculative_tokens": 4}, {"speculation": "measure"}):
        with pytest.raises(ZeroDivisionError):
            LLM(path, speculative_method="ngram", **changes, **SMALL)


def test_settings_without_effect_are_named(tiny_model):
    config = '{"method": "suffix", "suffix_decoding_min_token_prob": 0.2}'
    llm = LLM(tiny_model("llama", is_wide=True), speculative_config=config, **ALWAYS, **SMALL)
    assert any("suffix_decoding_min_token_prob has no effect" in n for n in llm.facts.notes)


def test_metrics_count_drafts(tiny_model):
    llm = LLM(
        tiny_model("llama", is_wide=True),
        speculative_method="ngram",
        num_speculative_tokens=3,
        **ALWAYS,
        **SMALL,
    )
    answers(llm)
    stats = Meter().snapshot(llm.llm_engine)
    totals = {total.name.removeprefix("vllm:spec_decode_num_"): total for total in stats.totals}
    assert totals["drafts"].values[""] > 0
    positions = totals["accepted_tokens_per_pos"]
    assert (positions.label, [*positions.values]) == ("position", ["0", "1", "2"])
    assert sum(positions.values.values()) == totals["accepted_tokens"].values[""] > 0
    assert totals["draft_tokens"].values[""] > totals["accepted_tokens"].values[""]


@pytest.mark.parametrize("options", [{}, {"speculative_method": "ngram", "speculation": "off"}])
def test_without_the_option_nothing_is_there(tiny_model, options):
    llm = LLM(tiny_model("llama"), **options, **SMALL)
    assert llm.llm_engine.strategy.extension is None
    executor = llm.llm_engine.executor
    assert isinstance(executor, PackedExecutor)
    assert not [column for column in executor._columns if isinstance(column, DraftColumn)]


def test_only_the_packed_executor_takes_the_option(tiny_model):
    with pytest.raises(ConfigurationError, match="speculative_method needs the packed executor"):
        LLM(tiny_model("llama"), executor="library", speculative_method="ngram")
