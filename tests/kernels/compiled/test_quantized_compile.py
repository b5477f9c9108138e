"""Products with one quantized weight and with those of experts, compiled for every GPU.

Requirements: tensor cores, wide loads of rows and codes, and no spills.

LONGSHORE_ALL_VARIANTS=1 checks the whole matrix and not a sample of it (`make variants`).
"""

from __future__ import annotations

from itertools import product

import pytest
import torch

from kernels import dry_run
from kernels.linear.grouped_quantized_linear import grouped_quantized_linear
from kernels.linear.quantized_linear import PER_BYTE, block_size, quantized_linear
from tests.kernels.compiled.gpus import ALL, ARCHS
from tests.kernels.compiled.static_check import facts, faults
from tests.kernels.quantized_inputs import empty_codes

BF16 = torch.bfloat16
NUM_EXPERTS = [None, 8]
"""A number selects `grouped_quantized_linear`, None selects `quantized_linear`."""


def variants():
    """Return (kind, rows multiplied by each weight, inputs, group size, dtype)."""
    if not ALL:
        return [("int4", 1, 4096, 128, BF16), ("int4", 300, 4096, 32, BF16),
                ("int8", 1, 4096, 4096, BF16), ("fp8", 300, 4096, 128, torch.float16),
                ("fp4", 1, 2880, 32, BF16), ("fp4", 300, 2880, 32, BF16)]  # fmt: skip
    return product(PER_BYTE, (1, 17, 300), (4096,), (32, 128), (BF16, torch.float16))


@pytest.mark.matrix
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_experts", NUM_EXPERTS)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kind", PER_BYTE)
def test_compiled_kernels_meet_the_requirements(kind, arch, num_experts):
    for variant in variants():
        if variant[0] != kind:
            continue
        kernel = compiled(arch, num_experts, *variant)
        found = facts(kernel)
        assert not faults(kernel, arch), (variant, found)
        assert found.wide_loads > 0, (variant, found)
        assert found.tensor_core_ops > 0, (variant, found)


@pytest.mark.parametrize("num_experts", NUM_EXPERTS)
def test_sizes_compile_no_variants(num_experts):
    """The layers of a model share their kernels. Weights with one scale per output use the same
    kernels as weights with groups."""
    first = compiled(90, num_experts, "int8", 1, 4096, 128, BF16)
    assert first.hash == compiled(90, num_experts, "int8", 2, 11008, 11008, BF16).hash


@pytest.mark.parametrize("num_experts", [1, 60, 128])
def test_numbers_of_experts_compile_no_variants(num_experts):
    """Models of up to MIN_EXPERTS experts share kernels: a program reads that many ends anyway."""
    first = compiled(90, 8, "int4", 1, 4096, 128, BF16)
    assert first.hash == compiled(90, num_experts, "int4", 1, 4096, 128, BF16).hash


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_gpus_that_have_fp8_convert_it(dtype):
    """An instruction converts two codes; before sm_89, a code takes several."""
    for arch, has_fp8 in ((86, False), (89, True)):
        kernel = compiled(arch, None, "fp8", 1, 4096, 128, dtype)
        assert ("cvt.rn.f16x2.e4m3x2" in kernel.asm["ptx"]) == has_fp8


def test_the_sample_has_all_kinds_and_blocks():
    sample = [(kind, block_size(kind, inputs, group)) for kind, _, inputs, group, _ in variants()]
    assert {kind for kind, _ in sample} == set(PER_BYTE)
    assert {block for _, block in sample} == {32, 64}


def compiled(arch, num_experts, kind, num_rows, num_inputs, group_size, dtype):
    size = (512, num_inputs) if num_experts is None else (num_experts, 512, num_inputs)
    codes, scales, zeros = empty_codes(kind, size, group_size)
    rows = torch.empty(num_rows * (num_experts or 1), num_inputs, dtype=dtype)
    with dry_run.target(arch) as launches:
        if num_experts is None:
            quantized_linear(rows, codes, scales, zeros, None, kind, group_size)
        else:
            ends = torch.zeros(num_experts, dtype=torch.int32)
            grouped_quantized_linear(rows, codes, scales, zeros, ends, kind, group_size)
    launch, *added = launches  # few rows are split over the inputs, and their sums added
    assert bool(added) == (num_experts is None and num_inputs > 2048)
    assert not any(faults(other.kernel, arch) for other in added)
    return launch.kernel
