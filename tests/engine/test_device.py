"""The choice of device and dtypes, and of Triton's kernel cache."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest
import torch

from core.errors import ConfigurationError
from core.options import Options
from engine.device import (
    check_tensor_parallel,
    choose_device,
    choose_dtype,
    choose_kv_dtype,
    is_out_of_memory,
    use_writable_kernel_cache,
)


def test_fp16_models_stay_fp16_on_cuda():
    class Config:
        dtype = torch.float16

    assert choose_dtype(Options(), Config(), torch.device("cuda")) == torch.float16
    Config.dtype = torch.float32
    assert choose_dtype(Options(), Config(), torch.device("cuda")) == torch.bfloat16


def test_fp8_is_stored_as_uint8_on_gpus_without_the_type(monkeypatch):
    cuda, options = torch.device("cuda"), Options(kv_cache_dtype="fp8")
    for capability, dtype in (((8, 6), torch.uint8), ((8, 9), torch.float8_e4m3fn)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        assert choose_kv_dtype(options, torch.bfloat16, cuda) == dtype
    with pytest.raises(ConfigurationError, match="needs"):
        choose_kv_dtype(options, torch.float32, cuda)


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
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if is_refused:
        with pytest.raises(ConfigurationError, match=r"number 0.*update the NVIDIA driver"):
            choose_device(Options(), tmp_path)
    else:
        assert choose_device(Options(), tmp_path).type == "cpu"
    assert choose_device(Options(device="cpu"), tmp_path).type == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert choose_device(Options(), tmp_path).type == "cpu", "the GPU is hidden on purpose"


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
