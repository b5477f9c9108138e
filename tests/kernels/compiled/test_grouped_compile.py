"""grouped_linear compiled for every GPU: tensor cores, 16-byte loads and stores, no spills.

LONGSHORE_ALL_VARIANTS=1 checks the whole matrix and not a sample of it (`make variants`).
"""

from __future__ import annotations

from itertools import product

import pytest
import torch

from kernels import dry_run
from kernels.linear.grouped_linear import grouped_linear
from tests.kernels.compiled.gpus import ALL, ARCHS
from tests.kernels.compiled.static_check import facts, faults

BF16, FP32 = torch.bfloat16, torch.float32
ROWS = (1, 17, 33, 300)
"""Rows of an expert: one number per tile height."""
INPUTS = (768, 720, 100)
"""A multiple of a tile's size, a multiple of 16, and neither."""


def variants():
    """Return (experts, rows of each, inputs, dtype)."""
    if not ALL:
        return [(60, 1, 768, BF16), (8, 300, 768, BF16), (8, 33, 720, FP32), (8, 300, 100, BF16)]
    return product((1, 8, 128), ROWS, INPUTS, (BF16, torch.float16, FP32))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", ARCHS)
def test_compiled_kernels_meet_the_requirements(arch):
    for variant in variants():
        num_inputs, dtype = variant[2:]
        found = check(compiled(arch, *variant), arch, variant)
        if num_inputs % 16 == 0:
            assert min(found.wide_loads, found.wide_stores) > 0, (variant, found)
            assert max(found.narrow_loads, found.narrow_stores) == 0, (variant, found)
        assert found.tensor_core_ops > 0 or dtype == FP32, (variant, found)


def test_sizes_compile_no_variants():
    """Sizes matter only by their divisibility, so the layers of a mixture of experts share their
    kernels."""
    first, second = (compiled(90, 8, *sizes, BF16) for sizes in ((40, 768), (60, 2048)))
    assert first.hash == second.hash


def compiled(arch, num_experts, num_rows, num_inputs, dtype):
    rows = torch.empty(num_experts * num_rows, num_inputs, dtype=dtype)
    weights = torch.empty(num_experts, 512, num_inputs, dtype=dtype)
    with dry_run.target(arch) as launches:
        grouped_linear(rows, weights, torch.zeros(num_experts, dtype=torch.int32))
    (launch,) = launches
    return launch.kernel


def check(kernel, arch, variant):
    found = facts(kernel)
    assert not faults(kernel, arch), (variant, found)
    return found
