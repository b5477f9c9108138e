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
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm
from triton import knobs
from triton.backends.nvidia import driver

from kernels import dry_run
from kernels.cache.block_copy import copy_blocks
from kernels.cache.cache_table import cache_table
from kernels.cache.swap import gather_blocks, scatter_blocks
from kernels.linear.dequantize import dequantize
from kernels.linear.grouped_linear import grouped_linear
from kernels.linear.grouped_quantized_linear import grouped_quantized_linear
from kernels.linear.quantized_linear import PER_BYTE, quantized_linear
from kernels.linear.row_codes import row_codes
from kernels.precompiled_layers import BLOCK_SIZE, SHAPES, TOKENS, Layers
from kernels.sampling.best_tokens import best_tokens
from kernels.sampling.candidates import collect_candidates
from kernels.sampling.draw_tokens import draw_tokens
from kernels.sampling.filter_limits import filter_limits
from kernels.sampling.token_weights import DrawnRows

VOCAB_SIZES = (32000, 128256, 151936)
"""The vocabulary sizes of Llama 2 and Mistral, of Llama 3, and of Qwen 2.5 and 3."""
NUM_ROWS = (1, 32, 64)
"""Numbers of rows that together select every tile height of quantized weights."""
FP8_ARCH = 89
"""The first GPUs that multiply in fp8."""
ROW_WIDTHS = (1024, 2048, 4096, 8192)
"""Widths of rows that together select every tile of their fp8 codes, for rows of 513 and more."""
_INPUTS, _OUTPUTS = 256, 64
"""Sizes of the quantized weights to compile for."""
_SPLIT_INPUTS = 2048
"""So many that programs split them."""


def compile_layers(arch: int, layers: Layers) -> list[dry_run.Launch]:
    """Compile for sm_`arch` all kernels of these layers but products."""
    with dry_run.target(arch) as launches:
        layers.launch()
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
    token_ids = torch.zeros(TOKENS, dtype=torch.int64)
    ones, double_ones = torch.ones(TOKENS), torch.ones(TOKENS, dtype=torch.float64)
    drawn_rows = DrawnRows(token_ids, ones, ones, token_ids, double_ones, double_ones)
    with dry_run.target(arch) as launches:
        for dtype in (torch.bfloat16, torch.float32):
            logits = torch.empty(TOKENS, vocab_size, dtype=dtype)
            best_tokens(logits)
            limits = filter_limits(collect_candidates(logits, token_ids, drawn_rows), drawn_rows)
            draw_tokens(logits, token_ids, drawn_rows, limits, double_ones)
    return launches


def compile_quantized(arch: int) -> list[dry_run.Launch]:
    """Compile the products of bf16 rows and quantized weights, whose sizes do not matter."""
    bias = torch.empty(_OUTPUTS, dtype=torch.bfloat16)
    with dry_run.target(arch) as launches:
        for rows, kind in product(NUM_ROWS, PER_BYTE):
            # Groups of 128 inputs are read in blocks of 64. MXFP4, which only gpt-oss's experts
            # have, has groups of 32.
            group_size = 32 if kind == "fp4" else _INPUTS // 2
            _compile_quantized_experts(rows, kind, group_size)
            if kind == "fp4":
                continue
            for num_inputs in (_INPUTS, _SPLIT_INPUTS):
                hidden = torch.empty(rows, num_inputs, dtype=torch.bfloat16)
                weight = _quantized(kind, group_size, num_inputs)
                for added in (None, bias):
                    quantized_linear(hidden, *weight, added, kind, group_size)
            dequantize(*weight, kind, group_size, torch.bfloat16)
        for width in ROW_WIDTHS if arch >= FP8_ARCH else ():
            row_codes(torch.empty(TOKENS, width, dtype=torch.bfloat16))
    return launches


def compile_experts(arch: int) -> list[dry_run.Launch]:
    """Compile the products of bf16 rows and up to 512 experts, whose sizes do not matter.

    sm_90 has torch's product instead.
    """
    with dry_run.target(arch) as launches:
        if arch == 90:
            return launches
        for num_experts, rows_of_expert in product((128, 256, 512), (16, 32, 64, 128)):
            rows = torch.empty(num_experts * rows_of_expert, _INPUTS, dtype=torch.bfloat16)
            weights = torch.empty(num_experts, _OUTPUTS, _INPUTS, dtype=torch.bfloat16)
            grouped_linear(rows, weights, torch.zeros(num_experts, dtype=torch.int32))
    return launches


def _compile_quantized_experts(rows_of_expert: int, kind: str, group_size: int) -> None:
    rows = torch.empty(2 * rows_of_expert, _INPUTS, dtype=torch.bfloat16)
    codes, scales, zeros = _quantized(kind, group_size, _INPUTS, 2)
    ends = torch.zeros(2, dtype=torch.int32)
    grouped_quantized_linear(rows, codes, scales, zeros, ends, kind, group_size)


def _quantized(
    kind: str, group_size: int, num_inputs: int, *num_experts: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return uninitialized codes, scales and zero points."""
    group_shape = (*num_experts, num_inputs // group_size, _OUTPUTS)
    codes = torch.empty(*num_experts, _OUTPUTS, num_inputs // PER_BYTE[kind], dtype=torch.uint8)
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


def _compile_job(job: tuple[int, Layers | int | None]) -> int:
    """Compile the kernels of one job, and return their number.

    job: an arch, and layers, or a vocabulary size for the sampling kernels, or None for the kernels
    that depend on neither.
    """
    arch, size = job
    if size is None:
        parts = (compile_block_moves, compile_quantized, compile_experts)
        return sum(len(compile_part(arch)) for compile_part in parts)
    if isinstance(size, int):
        return len(compile_sampling(arch, size))
    return len(compile_layers(arch, size))


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
