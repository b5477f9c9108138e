"""Decisions at start-up and their error messages."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from core.configuration.options import Options
from core.configuration.step_size import graph_sizes
from core.errors import (
    ConfigurationError,
    EngineUnavailableError,
    InsufficientMemoryError,
    RequestError,
)
from engine import LLM, SamplingParams
from engine.attention.backends import TorchBackend
from engine.build import load
from engine.builders.graphs import capture
from engine.device import (
    cpu_has_bf16,
)
from engine.group import Group
from engine.loading.gate import MAX_RELATIVE_ERROR
from engine.phases import Phases
from engine.resolve import resolve
from engine.step.block_mover import BlockMover
from engine.step.step_graphs import StepGraphs
from tests.engine.resolved import resolved
from tests.engine.step.graphs import Imitation


@pytest.fixture
def llama(tiny_model):
    return tiny_model("llama")


def test_a_decoder_defaults_to_paged(llama):
    facts = LLM(llama).facts
    assert (facts.batching, facts.executor) == ("paged", "packed")
    assert facts.batching_reason.startswith("default")


def test_other_models_default_to_dynamic(tiny_model):
    facts = LLM(tiny_model("t5")).facts
    assert (facts.batching, facts.executor) == ("dynamic", "library")


def test_dtype_option(llama):
    assert LLM(llama, dtype="fp32").facts.dtype == "float32"
    assert LLM(llama, dtype="bfloat16").facts.dtype == "bfloat16"
    expected = "bfloat16" if cpu_has_bf16() else "float32"
    assert LLM(llama).facts.dtype == expected


def test_an_fp8_kv_cache_takes_half_the_memory_and_answers_nearly_the_same(llama):
    params = SamplingParams(temperature=0, max_tokens=1)
    prompts = [[1 + (7 * n + k) % 90 for k in range(9)] for n in range(8)]
    plain = LLM(llama, dtype="bf16", batching="none")
    small = LLM(llama, dtype="bf16", batching="none", kv_cache_dtype="fp8")
    assert small.facts.kv_bytes * 2 == plain.facts.kv_bytes
    assert (plain.facts.kv_dtype, small.facts.kv_dtype) == ("bfloat16", "fp8 e4m3")
    logprobs = [
        torch.tensor(
            [
                request.outputs[0].cumulative_logprob
                for request in llm.generate(prompts, params, use_tqdm=False)
            ]
        )
        for llm in (plain, small)
    ]
    assert not torch.equal(*logprobs), "the cache must really be fp8"
    torch.testing.assert_close(*logprobs, atol=0.5, rtol=0)  # large, as the weights are random


def test_all_end_of_sequence_tokens_count(llama, tmp_path):
    copy = shutil.copytree(llama, tmp_path / "copy")
    (copy / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert LLM(copy).facts.eos_token_ids == (5, 6)
    (copy / "generation_config.json").unlink()
    assert LLM(copy).facts.eos_token_ids == (0,)


def test_a_model_without_weights_is_rejected(llama, tmp_path):
    copy = shutil.copytree(llama, tmp_path / "copy")
    (copy / "model.safetensors").unlink()
    with pytest.raises(
        ConfigurationError, match=r"no weights .*option\.load_format=dummy uses random weights"
    ):
        LLM(copy)
    (copy / "model.safetensors").write_text("{")
    with pytest.raises(ConfigurationError, match="cannot read"):
        LLM(copy)
    (copy / "config.json").write_text("{")
    with pytest.raises(ConfigurationError, match="cannot read"):
        LLM(copy)


def test_a_forward_pass_runs_before_ready(llama, monkeypatch):
    def fail(self, plan, between_tokens):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr("engine.step.packed_executor.PackedExecutor.submit", fail)
    with pytest.raises(ConfigurationError, match=r"cannot answer: RuntimeError: no kernel image"):
        LLM(llama)


def test_a_rank_that_is_lost_in_the_first_steps_is_no_wrong_configuration(llama, monkeypatch):
    """After an EngineUnavailableError, the container starts the engine again."""

    def fail(self, plan, between_tokens):
        raise EngineUnavailableError("rank 1 stopped answering")

    monkeypatch.setattr("engine.step.packed_executor.PackedExecutor.submit", fail)
    with pytest.raises(EngineUnavailableError, match="rank 1 stopped answering"):
        LLM(llama)


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ({}, {"swap_outs", "swap_ins", "copies"}),
        ({"preemption_mode": "recompute"}, {"copies"}),
        ({"block_size": 64, "num_kv_blocks": 1, "swap_space_gib": 0}, set()),
    ],
)
def test_block_moves_run_before_ready(llama, monkeypatch, options, kinds):
    """No request must wait until the kernel that moves its blocks is compiled."""
    launched = []
    launch = BlockMover.launch

    def watch(mover, moves):
        launched.append(moves)
        launch(mover, moves)

    monkeypatch.setattr(BlockMover, "launch", watch)
    LLM(llama, **options)
    names = ("swap_outs", "swap_ins", "copies")
    assert {name for moves in launched for name in names if getattr(moves, name)} == kinds


def test_differences_in_low_precision_are_tolerated(llama, monkeypatch):
    """In bf16, logits may differ by chance, for example at a router's near ties. So a model that
    fails in bf16 is tried again in fp32, and that result counts."""
    decoder = "transformers"
    plain = LLM(llama, dtype="bf16", decoder=decoder).facts
    monkeypatch.setitem(MAX_RELATIVE_ERROR, torch.bfloat16, -1.0)
    facts = LLM(llama, dtype="bf16", decoder=decoder).facts
    assert facts.decoder.startswith(decoder)
    assert (facts.executor, facts.dtype) == ("packed", "bfloat16")
    assert facts.weights_bytes == plain.weights_bytes


def test_requests_without_a_seed_have_different_samples(llama):
    llm = LLM(llama, dtype="fp32")
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    answers = llm.generate([[1, 2]] * 3, params, use_tqdm=False)
    assert len({tuple(answer.outputs[0].token_ids) for answer in answers}) == 3


def test_dynamic_batches_32_by_default(llama):
    assert LLM(llama, batching="dynamic").facts.max_sequences == 32
    assert LLM(llama, batching="dynamic", batch_size=1).facts.max_sequences == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_kv_blocks": 4, "max_model_len": 128}, "holds 64 tokens, less than one sequence"),
        ({"max_model_len": 129}, "the model was trained for 128"),
        ({"kv_cache_memory_bytes": 1}, "holds 0 tokens"),
        ({"tensor_parallel_degree": "two"}, "expected a positive integer or max"),
        ({"tensor_parallel_degree": "0"}, "expected a positive integer or max"),
        ({"batchin": "paged"}, "did you mean 'batching'"),
        ({"predict_timeout": 3}, "'predict_timeout' has no effect without a server"),
        ({"batch_size": "8"}, "batch_size=8: expected an integer"),
    ],
)
def test_unsupported_options_are_rejected(llama, options, message):
    with pytest.raises(ConfigurationError, match=message):
        LLM(llama, **options)


def test_a_directory_without_a_model_is_rejected(tmp_path):
    with pytest.raises(ConfigurationError, match=r"has no config\.json"):
        LLM(tmp_path)


def test_on_cuda_steps_use_graphs_by_default(monkeypatch):
    class Captured:
        num_timed_out = num_device_bound = 0

        def __init__(self, *parts, max_model_len, skips_device_bound, **_):
            self.max_model_len, self.skips_device_bound = max_model_len, skips_device_bound
            self.sizes = parts[-1]
            max_rows = max(size.num_decodes for size in self.sizes)
            if max_rows > 9:
                raise torch.OutOfMemoryError("tried to allocate 2 GiB")
            if max_rows > 8:
                raise RuntimeError("not permitted when stream is capturing\nat line 3")

    monkeypatch.setattr("engine.builders.graphs.CudaRecorder", object)
    monkeypatch.setattr("engine.builders.graphs.StepGraphs", Captured)

    def graphs(max_sequences=8, backend=None, **options):
        found = resolved("cuda", max_rolling_batch_size=max_sequences, **options)
        capacity = SimpleNamespace(max_model_len=64, max_step_tokens=512)
        model = SimpleNamespace(states=())
        return capture(model, None, backend, found, capacity, Group("cpu"))

    found, notes = graphs()
    assert (found.max_model_len, found.skips_device_bound, notes) == (64, True, ())
    assert found.sizes == graph_sizes(8, 512, (64, 128, 256, 512))
    found, _ = graphs(cuda_graph_sizes="16,32")
    assert (found.sizes, found.skips_device_bound) == (graph_sizes(8, 512, (16, 32)), False)
    found, _ = graphs(speculative_method="ngram", num_speculative_tokens=3)
    assert found.sizes == graph_sizes(8, 512, (64, 128, 256, 512), 3)
    found, _ = graphs(cuda_graph_sizes="0")
    assert not any(size.num_prompts for size in found.sizes)
    assert resolved("cuda", enforce_eager=True).graph_prompt_sizes is None
    assert graphs(backend=TorchBackend()) == (None, ())
    failed = "steps run without CUDA graphs: not permitted when stream is capturing"
    assert graphs(max_sequences=9) == (None, (failed,))
    with pytest.raises(InsufficientMemoryError, match=r"lower option\.gpu_memory_utilization"):
        graphs(max_sequences=10)
    Captured.num_timed_out, Captured.num_device_bound = 3, 4
    _, (late, bound) = graphs()
    assert late.startswith("3 sizes of steps with prompts have no CUDA graph: capturing stopped")
    assert bound.startswith("4 sizes of steps with prompts have no CUDA graph, which")


def test_on_cuda_the_allocator_and_the_kernel_cache_are_set_up_first(llama, monkeypatch):
    calls = []

    def read_config(model_dir, trust_remote_code):
        raise ConfigurationError(f"read after {calls}")

    for name in ("use_expandable_segments", "use_writable_kernel_cache"):
        monkeypatch.setattr(f"engine.build.{name}", lambda name=name: calls.append(name) or ())
    monkeypatch.setattr("engine.build.read_config", read_config)
    monkeypatch.setattr("engine.loading.kept_config.read_kept", lambda model_dir: None)
    for device, expected in (
        ("cpu", []),
        ("cuda", ["use_expandable_segments", "use_writable_kernel_cache"]),
    ):
        with pytest.raises(ConfigurationError, match=re.escape(f"read after {expected}")):
            load(llama, Options(), torch.device(device), Phases(), Group(torch.device(device)))
        calls.clear()


def test_the_start_says_how_many_graphs_it_captured_and_how_long_that_took(llama, monkeypatch):
    def imitate(model, cache, backend, resolved, capacity, group):
        parts, graphs = (model, cache, backend, Imitation()), graph_sizes(2, 16, (4, 8))
        return StepGraphs(*parts, graphs, max_model_len=capacity.max_model_len), ("a note",)

    def resolve_with_graphs(options, source, num_ranks):
        return replace(resolve(options, source, num_ranks), graph_prompt_sizes=(4, 8))

    monkeypatch.setattr("engine.build.resolve", resolve_with_graphs)
    monkeypatch.setattr("engine.builders.graphs.capture", imitate)
    facts = LLM(llama, dtype="fp32").facts
    assert list(facts.phases)[-3:] == ["K and V", "6 CUDA graphs", "first steps"]
    assert "a note" in facts.notes


def test_only_the_packed_executor_overlaps_steps(llama):
    assert not LLM(llama).llm_engine.overlaps
    assert LLM(llama, async_scheduling=True).llm_engine.overlaps
    library = LLM(llama, executor="library", batching="dynamic", async_scheduling=True)
    assert not library.llm_engine.overlaps


def test_the_degree_max_means_one_rank_on_a_cpu(llama):
    assert LLM(llama, tensor_parallel_degree="max").facts.num_ranks == 1


def test_a_program_without_a_server_may_limit_how_long_ranks_wait(llama):
    assert LLM(llama, model_loading_timeout=60).options.execution.model_loading_timeout == 60


def test_max_rolling_batch_size_limits_running_sequences(llama):
    llm = LLM(llama, max_rolling_batch_size=2, dtype="fp32")
    most = []
    submit = llm.llm_engine.executor.submit

    def watch(plan, between_tokens):
        most.append(len(plan.chunks))
        return submit(plan, between_tokens)

    llm.llm_engine.executor.submit = watch
    llm.generate([[1, 2]] * 5, SamplingParams(temperature=0, ignore_eos=True), use_tqdm=False)
    assert max(most) == 2


def test_the_prefill_budget_limits_a_step(llama):
    llm = LLM(llama, max_rolling_batch_prefill_tokens=7, dtype="fp32")
    plans = []
    submit = llm.llm_engine.executor.submit

    def watch(plan, between_tokens):
        plans.append(plan.num_tokens)
        return submit(plan, between_tokens)

    llm.llm_engine.executor.submit = watch
    llm.generate([[1] * 30] * 3, SamplingParams(temperature=0), use_tqdm=False)
    assert max(plans) == 7
    assert llm.facts.max_sequences == 7, "otherwise the newest sequence would never be scheduled"


def test_prompts_that_are_too_long_are_rejected_before_anything_runs(llama):
    llm = LLM(llama, dtype="fp32")
    with pytest.raises(RequestError, match=r"prompt: .*, and 200 tokens leave no room"):
        llm.generate([[1, 2], [1] * 200], use_tqdm=False)
    assert not llm.llm_engine.has_work()
    with pytest.raises(RequestError, match=r"max_tokens: .*, so 127 is more than the 126"):
        llm.generate([1, 2], SamplingParams(max_tokens=127), use_tqdm=False)
