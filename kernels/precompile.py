"""Compiles kernels into Triton's cache without a GPU: `python -m kernels.precompile`.

An image build runs this, so that serving a model of a common shape compiles nothing. It also builds
Triton's module of driver calls, the only part of Triton that needs a C compiler. Kernels for other
shapes are compiled at their first use, as usual.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm
from triton import knobs
from triton.backends.nvidia import driver

from kernels import dry_run
from kernels.attention.paged_decode import paged_decode
from kernels.attention.paged_prefill import paged_prefill, prefill_work
from kernels.attention.work_list import make_work_list
from kernels.cache.block_copy import copy_blocks
from kernels.cache.cache_table import cache_table
from kernels.cache.rotary_cache_write import rotary_write_kv
from kernels.cache.swap import gather_blocks, scatter_blocks
from kernels.elementwise.gated_activation import gated_activation
from kernels.elementwise.rms_norm import add_rms_norm, rms_norm
from kernels.linear.grouped_quantized_linear import grouped_quantized_linear
from kernels.linear.quantized_linear import PER_BYTE, quantized_linear
from kernels.sampling.best_tokens import best_tokens
from kernels.sampling.candidates import collect_candidates
from kernels.sampling.draw_tokens import draw_tokens
from kernels.sampling.filter_limits import filter_limits
from kernels.sampling.token_weights import DrawnRows

BLOCK_SIZE = 16
"""The default of `option.block_size`."""
VOCAB_SIZES = (32000, 128256, 151936)
"""The vocabulary sizes of Llama 2 and Mistral, of Llama 3, and of Qwen 2.5 and 3."""
_TOKENS = 3
_INPUTS, _OUTPUTS = 256, 64
"""Sizes of the quantized weights to compile for."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a decoder that its kernels depend on."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    norms_heads: bool = False
    """Whether queries and keys are normalized per head, as in Qwen 3."""


# If only some models of a shape normalize their heads, `norms_heads` is true: it only adds kernels.
SHAPES = (
    Shape(14, 2, 64, 896),  # Qwen 2.5 0.5B
    Shape(12, 2, 128, 1536),  # Qwen 2.5 1.5B
    Shape(28, 4, 128, 3584),  # Qwen 2.5 7B
    Shape(16, 8, 128, 1024, norms_heads=True),  # Qwen 3 0.6B
    Shape(32, 8, 128, 2560, norms_heads=True),  # Qwen 3 4B
    Shape(32, 8, 64, 2048),  # Llama 3.2 1B
    Shape(24, 8, 128, 3072),  # Llama 3.2 3B
    Shape(32, 8, 128, 4096, norms_heads=True),  # Llama 3.1 8B, Mistral 7B, Qwen 3 8B
    Shape(40, 8, 128, 5120, norms_heads=True),  # Qwen 2.5 and Qwen 3 14B
)


def compile_shape(arch: int, shape: Shape) -> list[dry_run.Launch]:
    """Compile for sm_`arch` all kernels that a decoder in bf16 launches, through their wrappers."""
    with dry_run.target(arch) as launches:
        query, key, value = _projected(shape)
        _compile_attention(query, key, value, shape)
        _compile_elementwise(shape)
    return launches


def compile_block_moves(arch: int) -> list[dry_run.Launch]:
    """Compile the kernels of copy-on-write and swapping, which do not depend on the shape."""
    cache = torch.empty(2, BLOCK_SIZE, 1, 64, dtype=torch.bfloat16)
    table = cache_table([cache, cache])
    staging = torch.empty(2, table.words_per_block, dtype=torch.int64)
    with dry_run.target(arch) as launches:
        block_ids = torch.zeros(2, dtype=torch.int64)
        copy_blocks(table, block_ids.view(1, 2))
        gather_blocks(table, block_ids, staging)
        scatter_blocks(table, block_ids, staging)
    return launches


def compile_sampling(arch: int, vocab_size: int) -> list[dry_run.Launch]:
    """Compile the kernels of sampling, for logits in bf16 and in fp32."""
    token_ids = torch.zeros(_TOKENS, dtype=torch.int64)
    ones, double_ones = torch.ones(_TOKENS), torch.ones(_TOKENS, dtype=torch.float64)
    drawn_rows = DrawnRows(token_ids, ones, ones, token_ids, double_ones, double_ones)
    with dry_run.target(arch) as launches:
        for dtype in (torch.bfloat16, torch.float32):
            logits = torch.empty(_TOKENS, vocab_size, dtype=dtype)
            best_tokens(logits)
            limits = filter_limits(collect_candidates(logits, token_ids, drawn_rows), drawn_rows)
            draw_tokens(logits, token_ids, drawn_rows, limits, double_ones)
    return launches


def compile_quantized(arch: int, num_rows: Sequence[int] = (1, 32, 64)) -> list[dry_run.Launch]:
    """Compile the products of bf16 rows and quantized weights, whose sizes do not matter.

    num_rows: numbers of rows that together select every tile height.
    """
    bias = torch.empty(_OUTPUTS, dtype=torch.bfloat16)
    with dry_run.target(arch) as launches:
        for rows, kind in product(num_rows, PER_BYTE):
            # Groups of 128 inputs are read in blocks of 64. MXFP4, which only gpt-oss's experts
            # have, has groups of 32.
            group_size = 32 if kind == "fp4" else _INPUTS // 2
            _compile_experts(rows, kind, group_size)
            if kind != "fp4":
                hidden = torch.empty(rows, _INPUTS, dtype=torch.bfloat16)
                weight = _quantized(kind, group_size)
                for added in (None, bias):
                    quantized_linear(hidden, *weight, added, kind, group_size)
    return launches


def _compile_experts(rows_of_expert: int, kind: str, group_size: int) -> None:
    rows = torch.empty(2 * rows_of_expert, _INPUTS, dtype=torch.bfloat16)
    codes, scales, zeros = _quantized(kind, group_size, 2)
    ends = torch.zeros(2, dtype=torch.int32)
    grouped_quantized_linear(rows, codes, scales, zeros, ends, kind, group_size)


def _quantized(
    kind: str, group_size: int, *num_experts: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return uninitialized codes, scales and zero points."""
    group_shape = (*num_experts, _INPUTS // group_size, _OUTPUTS)
    codes = torch.empty(*num_experts, _OUTPUTS, _INPUTS // PER_BYTE[kind], dtype=torch.uint8)
    scales = torch.empty(group_shape, dtype=torch.uint8 if kind == "fp4" else torch.float32)
    zeros = torch.empty(group_shape, dtype=torch.uint8) if kind.startswith("int") else None
    return codes, scales, zeros


def compile_driver_module() -> Path:
    """Build Triton's module of driver calls, which needs a C compiler but no driver.

    Returns the path of the module. Raises RuntimeError if Triton built none.
    """
    with tempfile.TemporaryDirectory() as directory:
        _make_stub(Path(directory) / "libcuda.so.1")
        with knobs.nvidia.scope():
            knobs.nvidia.libcuda_path = directory
            # Triton builds the module and caches it, and then fails to load it without the driver.
            with suppress(ImportError):
                driver.CudaUtils()
    for path in Path(knobs.cache.dir).glob("*/cuda_utils*.so"):
        return path
    raise RuntimeError(f"Triton left no cuda_utils in {knobs.cache.dir}")


def _make_stub(path: Path) -> None:
    """Build a stub with the driver's symbols, or the linker would drop the library as unused."""
    source = Path(driver.__file__).with_name("driver.c").read_text()
    names = sorted(set(re.findall(r"\bcu[A-Z]\w+(?=\()", source)))
    stub = "\n".join(f"void {name}(void) {{}}" for name in names)
    command = ["gcc", "-shared", f"-Wl,-soname,{path.name}", "-o", str(path), "-x", "c", "-"]
    subprocess.run(command, input=stub, text=True, check=True)


def _projected(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values as slices of one merged projection.

    If the shape norms heads, queries and keys are slices of the normed heads instead.
    """
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    rows = torch.empty(_TOKENS, sum(heads), shape.head_dim, dtype=torch.bfloat16)
    query, key, value = rows.split(heads, 1)
    if shape.norms_heads:
        both = rows[:, : sum(heads[:2])]
        query, key = rms_norm(both, both[0].contiguous(), 1e-6).split(heads[:2], 1)
    return query, key, value


def _compile_attention(query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> None:
    size = (2, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
    keys, values = (torch.empty(size, dtype=torch.bfloat16) for _ in range(2))
    cos, sin = torch.empty(2, _TOKENS, shape.head_dim // 2, dtype=torch.bfloat16)
    slots = torch.zeros(_TOKENS, dtype=torch.int64)
    rotary_write_kv(query, key, value, cos, sin, shape.head_dim, keys, values, slots)
    tables = torch.zeros(_TOKENS, 4, dtype=torch.int32)
    lens, starts = torch.ones(_TOKENS, dtype=torch.int32), torch.arange(_TOKENS + 1).int()
    out, scale = torch.empty(query.shape, dtype=query.dtype), shape.head_dim**-0.5
    options = {"scale": scale, "out": out}
    paged_decode(query, keys, values, tables, lens, work=make_work_list(lens, 4), **options)
    work = prefill_work(query, keys, starts, lens, 4)
    paged_prefill(query, keys, values, tables, starts, lens, work=work, **options)


def _compile_elementwise(shape: Shape) -> None:
    hidden = torch.empty(_TOKENS, shape.hidden_size, dtype=torch.bfloat16)
    rms_norm(hidden, hidden[0], 1e-6)
    add_rms_norm(hidden, hidden, hidden[0], 1e-6)
    gated_activation(torch.empty(_TOKENS, 2 * shape.hidden_size, dtype=torch.bfloat16), "silu")


def _compile_job(job: tuple[int, Shape | int | None]) -> int:
    """Compile the kernels of one job, and return their number.

    job: an arch, and the shape of a decoder, or a vocabulary size for the sampling kernels, or None
    for the kernels that depend on neither.
    """
    arch, size = job
    if size is None:
        return len(compile_block_moves(arch)) + len(compile_quantized(arch))
    if isinstance(size, int):
        return len(compile_sampling(arch, size))
    return len(compile_shape(arch, size))


def main() -> int:
    """Compile all shapes for all GPUs, on all cores."""
    jobs = list(product(dry_run.ARCHS, (None, *VOCAB_SIZES, *SHAPES)))
    compile_driver_module()
    with ProcessPoolExecutor() as pool:
        counts = pool.map(_compile_job, jobs)
        total = sum(tqdm(counts, "kernels", len(jobs), disable=not sys.stderr.isatty()))
    print(f"{total} kernels for sm_{', sm_'.join(map(str, dry_run.ARCHS))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
