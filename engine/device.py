"""Chooses the device and the data types."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from core.configuration.options import ExecutionOptions, MemoryOptions
from core.errors import ConfigurationError, InsufficientMemoryError
from core.process.gpus import visible_gpus

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "fp16": torch.float16,
    "float16": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
}
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def choose_device(execution: ExecutionOptions, device_files: Path = Path("/dev")) -> torch.device:
    """Return the device of option.device. With auto: CUDA if torch can use it, else the CPU.

    device_files: the directory of the operating system's device files.

    With cuda, raises ConfigurationError if torch can use no CUDA device. With auto, raises it if
    torch is built for CUDA but cannot use the NVIDIA GPU of this machine: an outdated driver must
    not make a GPU endpoint serve from its CPU.
    """
    has_cuda = torch.cuda.is_available()
    if execution.device == "cuda" and not has_cuda:
        raise ConfigurationError(
            f"option.device=cuda: no CUDA device is visible ({_cuda_failure()}); use auto or cpu"
        )
    if execution.device == "auto" and not has_cuda and torch.version.cuda is not None:
        gpus = visible_gpus(os.environ, device_files)
        if gpus:
            raise ConfigurationError(
                f"option.device=auto: this machine has a GPU (number {gpus[0]}), but torch "
                f"{torch.__version__} cannot use it: {_cuda_failure()}; update the NVIDIA driver, "
                "or set option.device=cpu"
            )
    use_cuda = has_cuda if execution.device == "auto" else execution.device == "cuda"
    return torch.device("cuda" if use_cuda else "cpu")


def _cuda_failure() -> str:
    """Return why torch has no CUDA device, in one line."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).partition("\n")[0].rstrip(".")
    return "torch.cuda.is_available() is false"


def choose_dtype(
    execution: ExecutionOptions, config: PreTrainedConfig, device: torch.device
) -> torch.dtype:
    """Return the type of weights and activations.

    With `auto`: on CUDA fp16 for an fp16 checkpoint, else bf16; on a CPU bf16 if its hardware
    multiplies bf16, else fp32.
    """
    if execution.dtype != "auto":
        return DTYPES[execution.dtype]
    if device.type == "cpu":
        return torch.bfloat16 if cpu_has_bf16() else torch.float32
    return torch.float16 if config.dtype == torch.float16 else torch.bfloat16


def choose_kv_dtype(memory: MemoryOptions, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the KV cache's type.

    GPUs without fp8 (compute capability below 8.9) store e4m3 values as uint8.

    Raises ConfigurationError for an fp8 cache with an fp32 model on CUDA, which the kernels do not
    support.
    """
    if memory.kv_cache_dtype == "auto":
        return dtype
    if device.type == "cuda" and dtype == torch.float32:
        raise ConfigurationError(
            f"option.kv_cache_dtype={memory.kv_cache_dtype} on CUDA needs a dtype of bf16 or fp16"
        )
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        return torch.uint8
    return torch.float8_e4m3fn


def use_expandable_segments(environment: Mapping[str, str] = os.environ) -> None:
    """Let torch's memory segments grow, unless the environment configures torch's allocator.

    In segments of fixed size, steps of many sizes would leave gaps.
    """
    if not any(environment.get(name) for name in ALLOCATOR_VARIABLES):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue] - torch has no public function


def use_writable_kernel_cache() -> tuple[str, ...]:
    """Give Triton a temporary cache if it cannot write to its own, and return a note for the log.

    On a read-only root file system, Triton could otherwise not compile the kernels that the image
    does not contain. The temporary cache starts as a copy of Triton's own cache.
    """
    from triton import knobs  # imported here, so that CPUs do not need Triton

    cache = Path(knobs.cache.dir)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            return ()
    except OSError:
        # In the container, TMPDIR is deleted when the supervisor ends.
        writable = tempfile.mkdtemp(prefix="triton-")
    unfinished = shutil.ignore_patterns("tmp.pid_*")  # files that other processes are writing
    # A kernel that cannot be copied is compiled again.
    with contextlib.suppress(OSError):
        shutil.copytree(cache, writable, dirs_exist_ok=True, ignore=unfinished)
    os.environ["TRITON_CACHE_DIR"] = writable
    return (f"{cache} is not writable: Triton compiles new kernels into {writable}",)


def cpu_has_bf16() -> bool:
    """Whether the CPU multiplies bf16 in hardware (AVX-512 or AMX on x86, Arm's bf16)."""
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return False
    return bool(words & {"avx512_bf16", "amx_bf16", "bf16"})


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error or one of its causes is a failed allocation, on the device or the host."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # torch has no exception class for a failed allocation on the host.
    # It has none either for a failed allocation by CUDA itself, such as that of a graph.
    messages = ("can't allocate memory", "CUDA error: out of memory")
    if isinstance(error, RuntimeError) and any(message in str(error) for message in messages):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)


@contextlib.contextmanager
def explaining_out_of_memory() -> Generator[None]:
    """Raise InsufficientMemoryError if memory runs out while a model loads within the context."""
    try:
        yield
    except Exception as error:
        if isinstance(error, InsufficientMemoryError) or not is_out_of_memory(error):
            raise
        reason = str(error).strip() or type(error).__name__
        raise InsufficientMemoryError(f"out of memory while loading the model: {reason}") from error
