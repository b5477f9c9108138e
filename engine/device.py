"""Which device and precision to run on."""

from __future__ import annotations

import errno
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from core.errors import ConfigurationError
from core.options import Options

DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "fp16": torch.float16,
    "float16": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
}


def choose_device(options: Options) -> torch.device:
    """Raises ConfigurationError where CUDA is asked for and absent."""
    has_cuda = torch.cuda.is_available()
    if options.device == "cuda" and not has_cuda:
        raise ConfigurationError("option.device=cuda: no CUDA device is visible; use auto or cpu")
    use_cuda = has_cuda if options.device == "auto" else options.device == "cuda"
    return torch.device("cuda" if use_cuda else "cpu")


def choose_dtype(options: Options, config: PreTrainedConfig, device: torch.device) -> torch.dtype:
    if options.dtype != "auto":
        return DTYPES[options.dtype]
    if device.type == "cpu":
        return torch.bfloat16 if cpu_has_bf16() else torch.float32
    return torch.float16 if config.dtype == torch.float16 else torch.bfloat16


def choose_kv_dtype(options: Options, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The type of the KV cache; fp8 e4m3 is kept as bytes on GPUs without the type.

    Raises ConfigurationError for fp8 beside fp32 on CUDA, which the kernels do not compute.
    """
    if options.kv_cache_dtype == "auto":
        return dtype
    if device.type == "cuda" and dtype == torch.float32:
        raise ConfigurationError(
            f"option.kv_cache_dtype={options.kv_cache_dtype} on CUDA needs a dtype of bf16 or fp16"
        )
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        return torch.uint8
    return torch.float8_e4m3fn


def cpu_has_bf16() -> bool:
    """Whether the CPU multiplies bf16 in hardware (x86 AVX-512 or AMX, Arm)."""
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return False
    return bool(words & {"avx512_bf16", "amx_bf16", "bf16"})


def is_out_of_memory(error: BaseException) -> bool:
    """Whether it, or what caused it, is an allocation that failed on a device or on the host."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # torch has no class of its own for an allocation that the host refuses.
    if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)


def check_tensor_parallel(options: Options, device: torch.device) -> tuple[str, ...]:
    """Notes on what is done instead; raises ConfigurationError where that would surprise."""
    asked = options.tensor_parallel_degree
    if asked is None or asked == "1":
        return ()
    if asked != "max" and not (asked.isdecimal() and int(asked) > 0):
        raise ConfigurationError(
            f"option.tensor_parallel_degree={asked}: expected a positive integer or max"
        )
    if device.type == "cpu":
        return (f"option.tensor_parallel_degree={asked}: one rank runs on the CPU",)
    num_devices = torch.cuda.device_count()
    if asked == "max":
        return (f"option.tensor_parallel_degree=max: one of {num_devices} devices is used",)
    degree = int(asked)
    if degree > num_devices:
        raise ConfigurationError(
            f"option.tensor_parallel_degree={asked}, but {num_devices} CUDA devices are visible"
        )
    if degree > 1:
        raise ConfigurationError(
            f"option.tensor_parallel_degree={asked}: this version runs a model on one device; "
            "set it to 1"
        )
    return ()
