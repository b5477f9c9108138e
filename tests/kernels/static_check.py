"""What a compiled kernel will cost on its GPU, read from its PTX and machine code."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.compiler.compiler import CompiledKernel

SHARED_MEMORY_LIMIT = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}
"""Bytes that one block may have, by arch (CUDA programming guide, compute capabilities)."""

_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")
# Each begins with a literal, which re finds forty times as fast as a word boundary.
_WIDE_LOADS = (
    r"cp\.async\.cg\.shared\.global.*, (?:0x10|16)\b",
    r"ld\.global\S*\.v4\.b32",
    r"ld\.global\S*\.v2\.b64",
)
_WIDE_STORES = (r"st\.global\S*\.v4\.b32", r"st\.global\S*\.v2\.b64")


@dataclass(frozen=True, slots=True)
class Facts:
    registers: int
    """Per thread."""
    stack_bytes: int
    """Per thread: spilled registers and the like, which live in device memory in disguise."""
    shared_bytes: int
    """Per block."""
    wide_loads: int
    """Of 16 bytes a thread, asynchronous copies to shared memory included."""
    narrow_loads: int
    """Of 1 or 2 bytes a thread: in the K/V path a sign that the address analysis gave up."""
    wide_stores: int
    narrow_stores: int
    tensor_core_ops: int
    """mma.sync, or wgmma on sm_90."""


def facts(kernel: CompiledKernel) -> Facts:
    """Reads one kernel, in milliseconds."""
    ptx = kernel.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        resources = _RESOURCES.search(_resource_usage(file.name))
    assert resources, "cuobjdump changed its output"
    return Facts(
        registers=int(resources[1]),
        stack_bytes=int(resources[2]) + int(resources[3]),
        shared_bytes=kernel.metadata.shared,
        wide_loads=_count(ptx, *_WIDE_LOADS),
        narrow_loads=_count(ptx, r"ld\.global\S*\.[bsu](?:8|16)\b"),
        wide_stores=_count(ptx, *_WIDE_STORES),
        narrow_stores=_count(ptx, r"st\.global\S*\.[bsu](?:8|16)\b"),
        tensor_core_ops=_count(ptx, r"mma\.sync", r"wgmma\.mma_async"),
    )


def faults(kernel: CompiledKernel, arch: int) -> list[str]:
    """What no kernel of ours may have: registers spilled to a stack, too much shared memory."""
    found, limit = facts(kernel), SHARED_MEMORY_LIMIT[arch]
    return [
        *([f"{found.stack_bytes} bytes of stack"] if found.stack_bytes else []),
        *([f"{found.shared_bytes} > {limit} shared"] if found.shared_bytes > limit else []),
    ]


def _resource_usage(path: str) -> str:
    """cuobjdump comes with Triton's wheel."""
    command = [_CUOBJDUMP, "-res-usage", path]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _count(text: str, *patterns: str) -> int:
    return sum(len(re.findall(pattern, text)) for pattern in patterns)
