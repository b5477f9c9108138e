"""Static properties of a compiled kernel, read from its PTX and machine code."""

from __future__ import annotations

import re
from dataclasses import dataclass

from triton.compiler.compiler import CompiledKernel

from benchmarks.gpu.occupancy import cuobjdump, resources

SHARED_MEMORY_LIMIT = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}
"""Bytes of shared memory per block, by arch (CUDA programming guide, compute capabilities)."""

# Each pattern starts with a literal, which re finds forty times as fast as a word boundary.
_WIDE_LOADS = (
    r"cp\.async\.cg\.shared\.global.*, (?:0x10|16)\b",
    r"ld\.global\S*\.v4\.b32",
    r"ld\.global\S*\.v2\.b64",
)
_BUFFERS = re.compile(r"ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x")
_WAITS = re.compile(r"cp\.async\.wait_group\s+(\d+)")
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?);")
_BACKWARD = re.compile(r"BRA\S* .*?(0x[0-9a-f]+)")
_STACK = re.compile(r"\b(?:LDL|STL)\b")
MOST_OF_A_LOOP = 0.01
"""The share of a loop's instructions that may read or write the stack."""
_WIDE_STORES = (r"st\.global\S*\.v4\.b32", r"st\.global\S*\.v2\.b64")


@dataclass(frozen=True, slots=True)
class Facts:
    registers: int
    """Registers per thread."""
    stack_bytes: int
    """Bytes per thread of local memory, which is device memory: spilled registers and the like."""
    shared_bytes: int
    """Bytes of shared memory per block."""
    wide_loads: int
    """Loads of 16 bytes per thread, including asynchronous copies to shared memory."""
    narrow_loads: int
    """Loads of 1 or 2 bytes per thread; in the K/V path, a sign of failed address analysis."""
    wide_stores: int
    narrow_stores: int
    tensor_core_ops: int
    """mma.sync, or wgmma on sm_90."""


def facts(kernel: CompiledKernel) -> Facts:
    """Read one compiled kernel, which takes milliseconds."""
    ptx = kernel.asm["ptx"]
    registers, stack_bytes = resources(kernel)
    return Facts(
        registers=registers,
        stack_bytes=stack_bytes,
        shared_bytes=kernel.metadata.shared,
        wide_loads=_count(ptx, *_WIDE_LOADS),
        narrow_loads=_count(ptx, r"ld\.global\S*\.[bsu](?:8|16)\b"),
        wide_stores=_count(ptx, *_WIDE_STORES),
        narrow_stores=_count(ptx, r"st\.global\S*\.[bsu](?:8|16)\b"),
        tensor_core_ops=_count(ptx, r"mma\.sync", r"wgmma\.mma_async"),
    )


@dataclass(frozen=True, slots=True)
class Pipeline:
    """How far ahead of the computed tile Triton's pipeliner loads."""

    buffers: set[int]
    """The number of shared-memory buffers of each tile that is loaded ahead, as a set."""
    wait_depth: int
    """Maximum number of copies in flight while waiting for a tile."""


def pipeline(kernel: CompiledKernel) -> Pipeline:
    buffers = _BUFFERS.findall(kernel.asm["ttgir"])
    waits = _WAITS.findall(kernel.asm["ptx"])
    return Pipeline({int(count) for count in buffers}, max(map(int, waits)))


def loop_instructions(kernel: CompiledKernel) -> int:
    """Return the number of machine instructions in the longest loop."""
    return max(map(len, _loops(kernel)))


def _loops(kernel: CompiledKernel) -> list[list[str]]:
    """Return the machine instructions of each loop; all of them if there is no loop."""
    found = _INSTRUCTION.findall(cuobjdump(kernel, "-sass"))
    code = {int(place, 16): text for place, text in found}
    jumps = [(place, _BACKWARD.search(text)) for place, text in code.items()]
    spans = [(int(jump[1], 16), place) for place, jump in jumps if jump]
    loops = [(begin, end) for begin, end in spans if begin < end] or [(0, max(code))]
    return [[code[place] for place in range(begin, end + 1, 16)] for begin, end in loops]


def faults(kernel: CompiledKernel, arch: int) -> list[str]:
    """Return errors: registers spilled to the stack in a loop, or too much shared memory.

    Before and after its loop, a kernel may keep a few registers on the stack: that costs nothing.
    """
    found, limit = facts(kernel), SHARED_MEMORY_LIMIT[arch]
    loops = _loops(kernel) if found.stack_bytes else []
    shares = [sum(map(bool, map(_STACK.search, loop))) / len(loop) for loop in loops]
    return [
        *[f"{share:.1%} of a loop are spills" for share in shares if share > MOST_OF_A_LOOP],
        *([f"{found.shared_bytes} > {limit} shared"] if found.shared_bytes > limit else []),
    ]


def _count(text: str, *patterns: str) -> int:
    return sum(len(re.findall(pattern, text)) for pattern in patterns)
