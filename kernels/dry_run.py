"""Runs the real wrappers on CPU tensors for a GPU that is not there. Nothing is launched.

Launches only compile their kernel. The wrappers choose tile sizes and pass real strides. So the
compiled code is exactly the code that they would launch, with the same specializations
(divisibility by 16, constants).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

ARCHS = (80, 86, 89, 90)
NUM_PROCESSORS = {80: 108, 86: 80, 89: 58, 90: 132}
"""Streaming multiprocessors of A100, A10G, L4 and H200."""
SHARED_BYTES = {80: 164 * 1024, 86: 100 * 1024, 89: 100 * 1024, 90: 228 * 1024}
THREADS = {80: 2048, 86: 1536, 89: 1536, 90: 2048}
"""Shared memory and threads of a multiprocessor (CUDA programming guide, compute capabilities)."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel[grid](...) of a wrapper."""

    name: str
    grid: tuple[int, ...]
    kernel: CompiledKernel


class FakeCuda:
    """The part of Triton's CUDA driver that compiling needs."""

    def __init__(self, arch: int) -> None:
        self._arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, 32)

    def get_current_device(self) -> int:
        return self._arch  # Triton caches kernels by device, so each arch has its own

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class IdleCuda(FakeCuda):
    """Adds the part of the driver that loading and launching need."""

    def __init__(self, arch: int) -> None:
        super().__init__(arch)
        self.utils = self

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 1 << 20}

    def load_binary(
        self, name: str, binary: bytes, shared: int, device: int
    ) -> tuple[int, int, int, int, int]:
        """Return module, function, registers, spills, and the maximum threads of a program."""
        return 1, 1, 0, 0, 1024

    def launcher_cls(self, source: ASTSource, metadata: Any) -> Callable[..., None]:
        return _launch_nothing


def _launch_nothing(*arguments: Any) -> None:
    pass


class FakeProperties:
    """The device properties that wrappers and benchmarks read from torch."""

    def __init__(self, arch: int) -> None:
        self.major, self.minor = divmod(arch, 10)
        self.multi_processor_count = NUM_PROCESSORS[arch]
        self.shared_memory_per_multiprocessor = SHARED_BYTES[arch]
        self.max_threads_per_multi_processor = THREADS[arch]


@contextmanager
def target(arch: int) -> Iterator[list[Launch]]:
    """Compile launches for sm_`arch` and append them to the list instead of running them.

    Outputs of the wrappers stay uninitialized. torch reports a current CUDA device of this arch.
    """
    launches: list[Launch] = []
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        launches.append(Launch(self.fn.__name__, grid, kernel))
        return kernel

    with (
        _active(FakeCuda(arch), arch),
        patch.object(JITFunction, "run", compile_only),
    ):
        yield launches


@contextmanager
def idle_gpu(arch: int) -> Iterator[None]:
    """Let launches pass through all of Triton and then do nothing."""
    with _active(IdleCuda(arch), arch):
        yield


@contextmanager
def _active(cuda: FakeCuda, arch: int) -> Iterator[None]:
    """Let Triton and torch report a current CUDA device of this arch."""
    previous = driver._active
    driver.set_active(cuda)
    try:
        with (
            patch("torch.cuda.get_device_capability", lambda device=None: divmod(arch, 10)),
            patch("torch.cuda.get_device_properties", lambda device=None: FakeProperties(arch)),
        ):
            yield
    finally:
        driver.set_active(previous)
