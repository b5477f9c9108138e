"""Decisions at start-up and their error messages."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path
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
    use_writable_kernel_cache,
)
from engine.loading.gate import MAX_RELATIVE_ERROR
from engine.memory.largest_step import run_step
from engine.memory.sizing import activation_bytes, kv_budget


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


def test_no_more_blocks_than_requests_can_use(llama):
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
                request.outputs[0].cumulative_logprob
                for request in llm.generate(prompts, params, use_tqdm=False)
            ]
        )
        for llm in (plain, small)
    ]
    assert not torch.equal(*logprobs), "the cache must really be fp8"
    torch.testing.assert_close(*logprobs, atol=0.5, rtol=0)  # with random weights


def test_fp8_is_stored_as_uint8_on_gpus_without_the_type(monkeypatch):
    cuda, options = torch.device("cuda"), Options(kv_cache_dtype="fp8")
    for capability, dtype in (((8, 6), torch.uint8), ((8, 9), torch.float8_e4m3fn)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        assert choose_kv_dtype(options, torch.bfloat16, cuda) == dtype
    with pytest.raises(ConfigurationError, match="needs"):
        choose_kv_dtype(options, torch.float32, cuda)


def test_the_default_budget_is_a_quarter_of_what_is_available(monkeypatch):
    monkeypatch.setattr("engine.memory.sizing.available_host_memory", lambda: 4000)
    assert kv_budget(Options(), torch.device("cpu")) == 1000


def test_on_cuda_the_budget_subtracts_used_memory_and_activations(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (700, 1000))
    options = Options(gpu_memory_utilization=0.8)
    assert kv_budget(options, torch.device("cuda"), activation_bytes=150) == 800 - 300 - 150
    assert kv_budget(options, torch.device("cuda"), activation_bytes=600) == 0


def test_the_largest_step_samples_a_token_per_sequence(llama):
    model = LLM(llama, dtype="fp32").llm_engine.executor.model
    tokens = run_step(model, 20, 7, lambda call, num_sequences: 0)
    assert tokens.shape == (7,)
    assert 0 <= tokens.min() <= tokens.max() < model.config.vocab_size


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_steps_and_graphs_are_budgeted_and_sampling_is_counted_once(llama, enforce_eager):
    model = LLM(llama, dtype="fp32").llm_engine.executor.model
    measured, attended = [], set()

    def measure(work, device):
        measured.append(tuple(work().shape))
        return 1000

    def scratch_bytes(call, num_sequences):
        attended.add((len(call.query), num_sequences))
        return 1

    options = Options(enforce_eager=enforce_eager)
    total = activation_bytes(options, model, 20, 7, scratch_bytes, measure)
    assert attended == {(20, 7)} | (set() if enforce_eager else {(7, 7)})
    vocab_size = model.config.vocab_size
    if enforce_eager:
        assert (measured, total) == ([(7,)], 1000)
    else:
        assert measured == [(7,), (7, vocab_size)], "a step with its sampled tokens, then logits"
        assert total == 2 * 1000 + 7 * vocab_size * 4


def test_available_memory_respects_the_container_limit(tmp_path):
    """Reclaimable file cache counts as available."""
    for name, text in (("max", "1000"), ("current", "900"), ("stat", "anon 1\ninactive_file 400")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert available_host_memory(tmp_path) == 500
    (tmp_path / "memory.max").write_text("max")
    assert available_host_memory(tmp_path) > 2**20


def test_a_nested_allocation_failure_is_recognized():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    wrapped = ConfigurationError("cannot be loaded")
    wrapped.__cause__ = caught.value
    for error in (wrapped, MemoryError(), OSError(errno.ENOMEM, "x"), torch.OutOfMemoryError()):
        assert is_out_of_memory(error)
    for error in (RuntimeError("x"), OSError(errno.ENOENT, "x"), ConfigurationError("x")):
        assert not is_out_of_memory(error)


def test_too_little_memory_is_not_a_configuration_error():
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


def test_a_model_without_weights_is_rejected(llama, tmp_path):
    copy = shutil.copytree(llama, tmp_path / "copy")
    (copy / "model.safetensors").unlink()
    with pytest.raises(
        ConfigurationError, match=r"no weights .*option\.load_format=dummy uses random ones"
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


@pytest.mark.parametrize(
    ("options", "moves"),
    [
        ({}, ["gather_blocks", "scatter_blocks", "copy_blocks"]),
        ({"preemption_mode": "recompute"}, ["copy_blocks"]),
        ({"block_size": 64, "num_kv_blocks": 1, "swap_space_gib": 0}, []),
    ],
)
def test_block_moves_run_before_ready(llama, monkeypatch, options, moves):
    """So that no request waits for those kernels to be compiled."""
    called = []
    for name in ("copy_blocks", "gather_blocks", "scatter_blocks"):
        monkeypatch.setattr(TorchBackend, name, lambda *_, name=name: called.append(name))
    LLM(llama, **options)
    assert called == moves


def test_differences_in_low_precision_are_tolerated(llama, monkeypatch):
    """bf16 may differ by chance, as with near ties of a router; fp32 decides."""
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


def test_max_model_len_is_lowered_to_fit_memory_with_a_note(llama):
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
def test_unsupported_options_are_rejected(llama, options, message):
    with pytest.raises(ConfigurationError, match=message):
        LLM(llama, **options)


def test_a_directory_without_a_model_is_rejected(tmp_path):
    with pytest.raises(ConfigurationError, match=r"has no config\.json"):
        LLM(tmp_path)


def test_cuda_is_rejected_without_a_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigurationError, match="no CUDA device is visible"):
        choose_device(Options(device="cuda"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a usable GPU")
@pytest.mark.parametrize(
    ("built_for_cuda", "files", "is_refused"),
    [
        ("13.0", ["nvidia0", "nvidiactl"], True),
        ("13.0", ["nvidiactl"], False),
        (None, ["nvidia0"], False),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_no_reason_to_serve_from_the_cpu(
    monkeypatch, tmp_path, built_for_cuda, files, is_refused
):
    monkeypatch.setattr(torch.version, "cuda", built_for_cuda)
    for name in files:
        (tmp_path / name).touch()
    if is_refused:
        with pytest.raises(ConfigurationError, match=r"nvidia0.*update the NVIDIA driver"):
            choose_device(Options(), tmp_path)
    else:
        assert choose_device(Options(), tmp_path).type == "cpu"
    assert choose_device(Options(device="cpu"), tmp_path).type == "cpu"


def test_a_read_only_kernel_cache_is_replaced_by_a_copy(monkeypatch, tmp_path):
    (tmp_path / "cache" / "a-kernel").mkdir(parents=True)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    assert use_writable_kernel_cache() == ()
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "cache")

    def read_only(dir):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", read_only)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (note,) = use_writable_kernel_cache()
    copy = Path(os.environ["TRITON_CACHE_DIR"])
    assert str(copy) in note
    assert copy.parent == tmp_path
    assert (copy / "a-kernel").is_dir()


class OnCuda:
    """A model stub with a CUDA device."""

    device = torch.device("cuda")


def test_on_cuda_decode_steps_use_graphs_by_default(monkeypatch):
    def captured(*_, max_rows, max_model_len, **__):
        if max_rows > 9:
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")
        if max_rows > 8:
            raise RuntimeError("not permitted when stream is capturing\nat line 3")
        return max_rows, max_model_len

    monkeypatch.setattr("engine.build.CudaRecorder", object)
    monkeypatch.setattr("engine.build.DecodeGraphs", captured)

    def graphs(max_sequences=8, backend=None, **options):
        sizes = SimpleNamespace(max_sequences=max_sequences, max_model_len=64)
        return build.capture_decode_graphs(OnCuda, None, backend, Options(**options), sizes)

    assert graphs() == ((8, 64), ())
    assert graphs(enforce_eager=True) == (None, ())
    assert graphs(backend=TorchBackend()) == (None, ())
    failed = "decode steps run without CUDA graphs: not permitted when stream is capturing"
    assert graphs(max_sequences=9) == (None, (failed,))
    with pytest.raises(InsufficientMemoryError, match=r"lower option\.gpu_memory_utilization"):
        graphs(max_sequences=10)


def test_on_cuda_steps_overlap_by_default(llama):
    assert build.overlaps_steps(Options(), OnCuda)
    assert not build.overlaps_steps(Options(async_scheduling=False), OnCuda)
    assert not LLM(llama).llm_engine.overlaps
    assert LLM(llama, async_scheduling=True).llm_engine.overlaps
    library = LLM(llama, executor="library", batching="dynamic", async_scheduling=True)
    assert not library.llm_engine.overlaps


def test_tensor_parallel_on_a_cpu_is_one_rank_with_a_note(llama):
    assert "one rank" in LLM(llama, tensor_parallel_degree="2").facts.notes[0]


def test_tensor_parallel_on_cuda_is_rejected(monkeypatch):
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
    assert llm.facts.max_sequences == 7, "otherwise the newest would never be scheduled"


def test_prompts_that_are_too_long_are_rejected_before_anything_runs(llama):
    llm = LLM(llama, dtype="fp32")
    with pytest.raises(RequestError, match="prompt: has 200 tokens"):
        llm.generate([[1, 2], [1] * 200], use_tqdm=False)
    assert not llm.llm_engine.has_work()
    with pytest.raises(RequestError, match="max_tokens: 127"):
        llm.generate([1, 2], SamplingParams(max_tokens=127), use_tqdm=False)
