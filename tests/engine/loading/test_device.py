"""The choice of device and dtypes, and of Triton's kernel cache."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest
import torch

from core.configuration.options import ExecutionOptions, Options, make_options
from core.errors import ConfigurationError
from engine.device import (
    choose_device,
    choose_dtype,
    choose_kv_dtype,
    is_out_of_memory,
    use_expandable_segments,
    use_writable_kernel_cache,
)
from engine.ranks.degree import notes_on_one_rank, tensor_parallel_degree


def test_fp16_models_stay_fp16_on_cuda():
    class Config:
        dtype = torch.float16

    assert choose_dtype(Options().execution, Config(), torch.device("cuda")) == torch.float16
    Config.dtype = torch.float32
    assert choose_dtype(Options().execution, Config(), torch.device("cuda")) == torch.bfloat16


def test_fp8_is_stored_as_uint8_on_gpus_without_the_type(monkeypatch):
    cuda, options = torch.device("cuda"), make_options({"kv_cache_dtype": "fp8"})
    for capability, dtype in (((8, 6), torch.uint8), ((8, 9), torch.float8_e4m3fn)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        assert choose_kv_dtype(options.memory, torch.bfloat16, cuda) == dtype
    with pytest.raises(ConfigurationError, match="needs"):
        choose_kv_dtype(options.memory, torch.float32, cuda)


def test_a_nested_allocation_failure_is_recognized():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    wrapped = ConfigurationError("cannot be loaded")
    wrapped.__cause__ = caught.value
    cuda = RuntimeError("CUDA error: out of memory")
    for error in (
        wrapped, cuda, MemoryError(), OSError(errno.ENOMEM, "x"), torch.OutOfMemoryError()
    ):  # fmt: skip
        assert is_out_of_memory(error)
    for error in (RuntimeError("x"), OSError(errno.ENOENT, "x"), ConfigurationError("x")):
        assert not is_out_of_memory(error)


def test_cuda_is_rejected_without_a_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigurationError, match="no CUDA device is visible"):
        choose_device(make_options({"device": "cuda"}).execution)


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
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if is_refused:
        with pytest.raises(ConfigurationError, match=r"number 0.*update the NVIDIA driver"):
            choose_device(Options().execution, tmp_path)
    else:
        assert choose_device(Options().execution, tmp_path).type == "cpu"
    assert choose_device(make_options({"device": "cpu"}).execution, tmp_path).type == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert choose_device(Options().execution, tmp_path).type == "cpu", (
        "the GPU is hidden on purpose"
    )


def test_a_read_only_kernel_cache_is_replaced_by_a_copy(monkeypatch, tmp_path):
    (tmp_path / "cache" / "a-kernel").mkdir(parents=True)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    assert use_writable_kernel_cache() == ()
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "cache")

    def read_only(dir):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", read_only)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "cache" / "tmp.pid_7_1").touch()
    (tmp_path / "cache" / "gone").symlink_to("nothing")
    (note,) = use_writable_kernel_cache()
    copy = Path(os.environ["TRITON_CACHE_DIR"])
    assert str(copy) in note
    assert copy.parent == tmp_path
    assert (copy / "a-kernel").is_dir()
    assert not (copy / "tmp.pid_7_1").exists(), "another process is still writing it"


def test_the_degree_is_at_most_the_number_of_gpus(monkeypatch):
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigurationError, match="this machine has 2 GPUs; set it to at most 2"):
        tensor_parallel_degree(ExecutionOptions(tensor_parallel_degree="4"), cuda)
    degrees = {None: 1, "1": 1, "2": 2, "max": 2}
    for degree, expected in degrees.items():
        assert (
            tensor_parallel_degree(ExecutionOptions(tensor_parallel_degree=degree), cuda)
            == expected
        )


def test_on_a_cpu_ranks_must_be_asked_for():
    cpu = torch.device("cpu")
    for degree, expected in {None: 1, "max": 1, "1": 1, "3": 3}.items():
        assert (
            tensor_parallel_degree(ExecutionOptions(tensor_parallel_degree=degree), cpu) == expected
        )
    assert notes_on_one_rank(ExecutionOptions(tensor_parallel_degree="1"), cpu) == ()
    (note,) = notes_on_one_rank(ExecutionOptions(tensor_parallel_degree="3"), cpu)
    assert "this task runs on one device" in note


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_memory_segments_grow_unless_the_user_configures_the_allocator(name):
    before = torch._C._accelerator_getAllocatorSettings()
    try:
        use_expandable_segments({name: "max_split_size_mb:64"})
        assert torch._C._accelerator_getAllocatorSettings() == before
        use_expandable_segments({})
        assert torch._C._accelerator_getAllocatorSettings() == "expandable_segments:True"
    finally:
        torch._C._accelerator_setAllocatorSettings(before)
