"""What start-up decides, and how it says no."""

from __future__ import annotations

import errno
import shutil
from types import SimpleNamespace

import pytest
import torch

from core.errors import ConfigurationError, InsufficientMemoryError, RequestError
from core.host_memory import available_host_memory
from core.options import Options
from core.sizing import fit_length
from engine import LLM, SamplingParams, build
from engine.attention.backends import TorchBackend
from engine.device import (
    check_tensor_parallel,
    choose_device,
    choose_dtype,
    choose_kv_dtype,
    cpu_has_bf16,
    is_out_of_memory,
)
from engine.loading.gate import MAX_RELATIVE_ERROR
from engine.memory.budget import kv_budget
from engine.memory.largest_step import run_step


@pytest.fixture
def llama(tiny_model):
    return tiny_model("llama")


def test_a_decoder_is_paged_when_nothing_is_said(llama):
    facts = LLM(llama).facts
    assert (facts.batching, facts.executor) == ("paged", "packed")
    assert "nothing said" in facts.batching_reason


def test_anything_else_is_dynamic_when_nothing_is_said(tiny_model):
    facts = LLM(tiny_model("t5")).facts
    assert (facts.batching, facts.executor) == ("dynamic", "library")


def test_dtype(llama):
    assert LLM(llama, dtype="fp32").facts.dtype == "float32"
    assert LLM(llama, dtype="bfloat16").facts.dtype == "bfloat16"
    expected = "bfloat16" if cpu_has_bf16() else "float32"
    assert LLM(llama).facts.dtype == expected


def test_fp16_models_stay_fp16_on_cuda():
    class Config:
        dtype = torch.float16

    assert choose_dtype(Options(), Config(), torch.device("cuda")) == torch.float16
    Config.dtype = torch.float32
    assert choose_dtype(Options(), Config(), torch.device("cuda")) == torch.bfloat16


def test_blocks_follow_the_memory_budget(llama):
    llm = LLM(llama, dtype="fp32", kv_cache_memory_bytes=64 * 2**10)
    # 3 layers x (K and V) x 2 heads x 8 dims x 16 tokens x 4 bytes
    per_block = 3 * 2 * 2 * 8 * 16 * 4
    assert llm.facts.num_kv_blocks == 64 * 2**10 // per_block
    assert llm.facts.kv_bytes == llm.facts.num_kv_blocks * per_block


def test_no_more_blocks_than_can_be_used(llama):
    assert LLM(llama, batching="none").facts.num_kv_blocks == 128 // 16
    assert LLM(llama, batch_size=3).facts.num_kv_blocks == 3 * 128 // 16
    assert LLM(llama, max_model_len=20, batching="none").facts.num_kv_blocks == 2


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
                each.outputs[0].cumulative_logprob
                for each in llm.generate(prompts, params, use_tqdm=False)
            ]
        )
        for llm in (plain, small)
    ]
    assert not torch.equal(*logprobs), "fp8 must be what is read"
    torch.testing.assert_close(*logprobs, atol=0.5, rtol=0)  # of random weights


def test_fp8_is_bytes_on_gpus_without_the_type(monkeypatch):
    cuda, options = torch.device("cuda"), Options(kv_cache_dtype="fp8")
    for capability, dtype in (((8, 6), torch.uint8), ((8, 9), torch.float8_e4m3fn)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        assert choose_kv_dtype(options, torch.bfloat16, cuda) == dtype
    with pytest.raises(ConfigurationError, match="needs"):
        choose_kv_dtype(options, torch.float32, cuda)


def test_the_default_budget_is_a_quarter_of_what_is_available(monkeypatch):
    monkeypatch.setattr("engine.memory.budget.available_host_memory", lambda: 4000)
    assert kv_budget(Options(), torch.device("cpu")) == 1000


def test_on_cuda_the_budget_is_a_share_less_what_is_used_and_what_a_step_takes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (700, 1000))
    options = Options(gpu_memory_utilization=0.8)
    assert kv_budget(options, torch.device("cuda"), activation_bytes=150) == 800 - 300 - 150
    assert kv_budget(options, torch.device("cuda"), activation_bytes=600) == 0


def test_the_largest_step_draws_a_token_for_every_sequence(llama):
    model = LLM(llama, dtype="fp32")._engine._executor._model
    tokens = run_step(model, num_tokens=20, num_sequences=7)
    assert tokens.shape == (7,)
    assert 0 <= tokens.min() <= tokens.max() < model.config.vocab_size


def test_a_container_leaves_what_its_limit_leaves(tmp_path, monkeypatch):
    """File cache that gives way is not used up."""
    monkeypatch.setattr("core.host_memory.CGROUP", tmp_path)
    for name, text in (("max", "1000"), ("current", "900"), ("stat", "anon 1\ninactive_file 400")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert available_host_memory() == 500
    (tmp_path / "memory.max").write_text("max")
    assert available_host_memory() > 2**20


def test_an_allocation_that_fails_is_known_below_other_errors():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    wrapped = ConfigurationError("cannot be loaded")
    wrapped.__cause__ = caught.value
    for error in (wrapped, MemoryError(), OSError(errno.ENOMEM, "x"), torch.OutOfMemoryError()):
        assert is_out_of_memory(error)
    for error in (RuntimeError("x"), OSError(errno.ENOENT, "x"), ConfigurationError("x")):
        assert not is_out_of_memory(error)


def test_too_little_memory_is_not_the_fault_of_the_options():
    for options, kind in (
        (Options(), InsufficientMemoryError),
        (Options(max_model_len=50), InsufficientMemoryError),
        (Options(num_kv_blocks=1), ConfigurationError),
        (Options(kv_cache_memory_bytes=1), ConfigurationError),
    ):
        with pytest.raises(ConfigurationError) as caught:
            fit_length(options, max_len=50, num_slots=1)
        assert type(caught.value) is kind


def test_all_end_of_sequence_tokens_count(llama, tmp_path):
    copy = shutil.copytree(llama, tmp_path / "copy")
    (copy / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert LLM(copy).facts.eos_token_ids == (5, 6)
    (copy / "generation_config.json").unlink()
    assert LLM(copy).facts.eos_token_ids == (0,)


def test_a_model_without_weights_is_refused(llama, tmp_path):
    copy = shutil.copytree(llama, tmp_path / "copy")
    (copy / "model.safetensors").unlink()
    with pytest.raises(ConfigurationError, match=r"no weights .*option\.load_format=dummy runs it"):
        LLM(copy)
    (copy / "model.safetensors").write_text("{")
    with pytest.raises(ConfigurationError, match="cannot read"):
        LLM(copy)
    (copy / "config.json").write_text("{")
    with pytest.raises(ConfigurationError, match="cannot read"):
        LLM(copy)


def test_ready_means_that_a_forward_has_passed(llama, monkeypatch):
    def fail(self, plan, between_tokens):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr("engine.step.packed_executor.PackedExecutor.submit", fail)
    with pytest.raises(ConfigurationError, match=r"cannot answer: RuntimeError: no kernel image"):
        LLM(llama)


@pytest.mark.parametrize(
    ("options", "moves"),
    [
        ({}, ["gather_blocks", "scatter_blocks", "copy_blocks"]),
        ({"preemption_mode": "recompute"}, ["copy_blocks"]),
        ({"block_size": 64, "num_kv_blocks": 1, "swap_space_gib": 0}, []),
    ],
)
def test_ready_means_that_blocks_can_be_moved(llama, monkeypatch, options, moves):
    """So that no request waits for those kernels to be compiled."""
    called = []
    for name in ("copy_blocks", "gather_blocks", "scatter_blocks"):
        monkeypatch.setattr(TorchBackend, name, lambda *_, name=name: called.append(name))
    LLM(llama, **options)
    assert called == moves


def test_low_precision_alone_is_no_reason_to_refuse(llama, monkeypatch):
    """Where bf16 differs by chance, as a router's near ties do, fp32 decides."""
    decoder = "transformers"
    plain = LLM(llama, dtype="bf16", decoder=decoder).facts
    monkeypatch.setitem(MAX_RELATIVE_ERROR, torch.bfloat16, -1.0)
    facts = LLM(llama, dtype="bf16", decoder=decoder).facts
    assert facts.decoder.startswith(decoder)
    assert (facts.executor, facts.dtype) == ("packed", "bfloat16")
    assert facts.weights_bytes == plain.weights_bytes


def test_requests_without_a_seed_differ(llama):
    llm = LLM(llama, dtype="fp32")
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    answers = llm.generate([[1, 2]] * 3, params, use_tqdm=False)
    assert len({tuple(each.outputs[0].token_ids) for each in answers}) == 3


def test_dynamic_gathers_32_unless_told_otherwise(llama):
    assert LLM(llama, batching="dynamic").facts.max_sequences == 32
    assert LLM(llama, batching="dynamic", batch_size=1).facts.max_sequences == 1


def test_max_model_len_is_lowered_to_the_memory_with_a_note(llama):
    facts = LLM(llama, num_kv_blocks=4).facts
    assert facts.max_model_len == 64
    assert "lowered from 128 to 64" in facts.notes[0]


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
def test_what_cannot_be_served_is_refused(llama, options, message):
    with pytest.raises(ConfigurationError, match=message):
        LLM(llama, **options)


def test_a_directory_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"has no config\.json"):
        LLM(tmp_path)


def test_cuda_is_refused_where_there_is_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigurationError, match="no CUDA device is visible"):
        choose_device(Options(device="cuda"))


class OnCuda:
    """As much of a model as decides how it is run."""

    device = torch.device("cuda")


def test_on_cuda_decode_steps_are_graphs_unless_told_otherwise(monkeypatch):
    def captured(*_, max_rows, max_model_len, **__):
        if max_rows > 8:
            raise RuntimeError("not permitted when stream is capturing\nat line 3")
        return max_rows, max_model_len

    monkeypatch.setattr("engine.build.CudaRecorder", object)
    monkeypatch.setattr("engine.build.DecodeGraphs", captured)

    def graphs(max_sequences=8, backend=None, **options):
        sizes = SimpleNamespace(max_sequences=max_sequences, max_model_len=64)
        return build._decode_graphs(OnCuda, None, backend, Options(**options), sizes)

    assert graphs() == ((8, 64), ())
    assert graphs(enforce_eager=True) == (None, ())
    assert graphs(backend=TorchBackend()) == (None, ())
    failed = "decode steps run without CUDA graphs: not permitted when stream is capturing"
    assert graphs(max_sequences=9) == (None, (failed,))


def test_steps_overlap_on_cuda_unless_told_otherwise(llama):
    assert build._overlaps(Options(), OnCuda)
    assert not build._overlaps(Options(async_scheduling=False), OnCuda)
    assert not LLM(llama)._engine._overlaps
    assert LLM(llama, async_scheduling=True)._engine._overlaps
    library = LLM(llama, executor="library", batching="dynamic", async_scheduling=True)
    assert not library._engine._overlaps


def test_tensor_parallel_on_the_cpu_is_one_rank_and_a_note(llama):
    assert "one rank" in LLM(llama, tensor_parallel_degree="2").facts.notes[0]


def test_tensor_parallel_on_cuda_is_refused_where_devices_lack(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    cuda = torch.device("cuda")
    with pytest.raises(ConfigurationError, match="1 CUDA devices are visible"):
        check_tensor_parallel(Options(tensor_parallel_degree="4"), cuda)
    assert check_tensor_parallel(Options(tensor_parallel_degree="1"), cuda) == ()
    (note,) = check_tensor_parallel(Options(tensor_parallel_degree="max"), cuda)
    assert "one of 1 devices is used" in note
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    with pytest.raises(ConfigurationError, match="set it to 1"):
        check_tensor_parallel(Options(tensor_parallel_degree="4"), cuda)


def test_max_rolling_batch_size_bounds_what_runs_at_once(llama):
    llm = LLM(llama, max_rolling_batch_size=2, dtype="fp32")
    most = []
    submit = llm._engine._executor.submit

    def watch(plan, between_tokens):
        most.append(len(plan.chunks))
        return submit(plan, between_tokens)

    llm._engine._executor.submit = watch
    llm.generate([[1, 2]] * 5, SamplingParams(temperature=0, ignore_eos=True), use_tqdm=False)
    assert max(most) == 2


def test_the_prefill_budget_bounds_a_step(llama):
    llm = LLM(llama, max_rolling_batch_prefill_tokens=7, dtype="fp32")
    plans = []
    submit = llm._engine._executor.submit

    def watch(plan, between_tokens):
        plans.append(plan.num_tokens)
        return submit(plan, between_tokens)

    llm._engine._executor.submit = watch
    llm.generate([[1] * 30] * 3, SamplingParams(temperature=0), use_tqdm=False)
    assert max(plans) == 7
    assert llm.facts.max_sequences == 7, "else the newest would never have a turn"


def test_too_long_is_refused_before_anything_runs(llama):
    llm = LLM(llama, dtype="fp32")
    with pytest.raises(RequestError, match="prompt: has 200 tokens"):
        llm.generate([[1, 2], [1] * 200], use_tqdm=False)
    assert not llm._engine.has_work()
    with pytest.raises(RequestError, match="max_tokens: 127"):
        llm.generate([1, 2], SamplingParams(max_tokens=127), use_tqdm=False)
