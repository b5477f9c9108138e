"""Pinned products compiled for every GPU: one tensor core instruction, whatever the rows.

LONGSHORE_ALL_VARIANTS=1 checks the whole matrix and not a sample of it (`make variants`).
"""

from __future__ import annotations

import re
from itertools import product

import pytest
import torch

from kernels import dry_run
from kernels.linear.grouped_linear import grouped_linear
from kernels.linear.pinned_linear import pinned_linear
from kernels.linear.quantized_linear import quantized_linear
from tests.kernels.compiled.gpus import ALL, ARCHS
from tests.kernels.compiled.static_check import facts, faults
from tests.kernels.quantized_inputs import empty_codes

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROWS = (1, 65)
"""One number per size of a tile."""
_MMA = re.compile(r"(wgmma\.mma_async\S*\.m64n)\d+(k\d+\S*)|(mma\.sync\S*)")


def variants():
    """Return (inputs, dtype, has a bias)."""
    if not ALL:
        return [(768, BF16, False), (720, FP32, True), (100, BF16, True)]
    return product((768, 720, 100), (BF16, FP16, FP32), (False, True))


@pytest.mark.matrix
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", ARCHS)
def test_compiled_kernels_meet_the_requirements(arch):
    for num_inputs, dtype, has_bias in variants():
        kernels = [
            *(compiled(arch, num_rows, num_inputs, dtype, has_bias) for num_rows in ROWS),
            *(compiled_experts(arch, num_rows, num_inputs, dtype) for num_rows in ROWS),
        ]
        for kernel in kernels:
            found = facts(kernel)
            assert not faults(kernel, arch), (num_inputs, dtype, found)
            if num_inputs % 16 == 0:
                assert min(found.wide_loads, found.wide_stores) > 0, found
        same = {tuple(sorted(instructions(kernel))) for kernel in kernels}
        assert len(same) == 1, same
        assert bool(*same) == (dtype != FP32)


@pytest.mark.parametrize("arch", ARCHS)
def test_large_tiles_use_the_instruction_of_their_generation(arch):
    (found,) = instructions(compiled(arch, 1, 768, BF16, False))
    assert found.startswith("wgmma" if arch == 90 else "mma.sync")


@pytest.mark.parametrize("kind", ["int4", "fp8"])
def test_a_quantized_weight_has_one_kernel(kind):
    codes, scales, zeros = empty_codes(kind, (512, 1024), 128)
    with dry_run.target(90) as launches:
        for num_rows in (1, 17, 300):
            rows = torch.empty(num_rows, 1024, dtype=BF16)
            quantized_linear(rows, codes, scales, zeros, None, kind, 128, is_pinned=True)
    assert len({launch.kernel.hash for launch in launches}) == 1


def instructions(kernel):
    """Return the tensor core instructions, without the width of wgmma's."""
    return {"".join(parts) for parts in _MMA.findall(kernel.asm["ptx"])}


def compiled(arch, num_rows, num_inputs, dtype, has_bias):
    rows, weight = (torch.empty(count, num_inputs, dtype=dtype) for count in (num_rows, 512))
    with dry_run.target(arch) as launches:
        pinned_linear(rows, weight, torch.empty(512, dtype=dtype) if has_bias else None)
    return launches[0].kernel


def compiled_experts(arch, num_rows, num_inputs, dtype):
    rows = torch.empty(8 * num_rows, num_inputs, dtype=dtype)
    weights = torch.empty(8, 512, num_inputs, dtype=dtype)
    with dry_run.target(arch) as launches:
        grouped_linear(rows, weights, torch.zeros(8, dtype=torch.int32), is_pinned=True)
    return launches[0].kernel
