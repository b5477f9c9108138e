"""How many programs of a compiled kernel a streaming multiprocessor runs at once."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.compiler.compiler import CompiledKernel

from kernels import dry_run
from kernels.configurations import AttentionConfiguration, current_arch

REGISTERS = 65536
"""Registers of a multiprocessor, on sm_80 and later (CUDA programming guide)."""
SHARED_BYTES_OF_SYSTEM = 1024
"""Shared memory that CUDA takes for each program (CUDA programming guide)."""
_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")


def programs_per_processor(kernel: CompiledKernel) -> int:
    """Return how many programs fit on a multiprocessor of the current GPU at once."""
    limits, warps = torch.cuda.get_device_properties(0), kernel.metadata.num_warps
    registers = -(-resources(kernel)[0] // 8) * 8 * 32 * warps
    shared = kernel.metadata.shared + SHARED_BYTES_OF_SYSTEM
    return min(
        limits.shared_memory_per_multiprocessor // shared,
        REGISTERS // registers,
        limits.max_threads_per_multi_processor // 32 // warps,
    )


@contextmanager
def using(kernel: str, configuration: AttentionConfiguration) -> Iterator[None]:
    """Let paged attention use this configuration. kernel: "decode" or "prefill"."""
    module = {"decode": "paged_decode", "prefill": "prefill_splits"}[kernel]
    with patch(f"kernels.attention.{module}.attention_configuration", lambda *_: configuration):
        yield


def with_programs(
    kernel: str, configuration: AttentionConfiguration, call: Callable[[], Any]
) -> AttentionConfiguration:
    """Return the configuration with the number of programs that fit on the current GPU.

    call: calls the wrapper of `kernel`, "decode" or "prefill".
    """
    with using(kernel, configuration), dry_run.target(current_arch()) as launches:
        call()
    name = f"paged_{kernel}_kernel"
    (compiled,) = (launch.kernel for launch in launches if launch.name == name)
    return replace(configuration, programs_per_processor=programs_per_processor(compiled))


def resources(kernel: CompiledKernel) -> tuple[int, int]:
    """Return a thread's registers and its bytes of local memory, which holds spilled registers."""
    found = _RESOURCES.search(cuobjdump(kernel, "-res-usage"))
    assert found, "cuobjdump changed its output"
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def cuobjdump(kernel: CompiledKernel, option: str) -> str:
    """Run cuobjdump, which comes with Triton's wheel, on the machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [_CUOBJDUMP, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
