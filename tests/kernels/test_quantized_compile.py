"""quantized_linear compiled for every GPU: no spills, wide loads of rows and codes, tensor cores.

LONGSHORE_ALL_VARIANTS=1 checks the whole matrix and not a sample of it (`make variants`).
"""

from __future__ import annotations

import os
from itertools import product

import pytest
import torch

from kernels import dry_run
from kernels.quantized_linear import quantized_linear
from tests.kernels.static_check import facts, faults

ALL = os.environ.get("LONGSHORE_ALL_VARIANTS") == "1"
BF16 = torch.bfloat16


def variants():
    """Return (kind, rows, inputs, group size, dtype)."""
    if not ALL:
        return [("int4", 1, 4096, 128, BF16), ("int4", 300, 4096, 32, BF16),
                ("int8", 1, 4096, 4096, BF16), ("fp8", 300, 4096, 128, torch.float16)]  # fmt: skip
    kinds, rows, groups = ("int4", "int8", "fp8"), (1, 17, 300), (32, 128, 4096)
    return product(kinds, rows, (4096,), groups, (BF16, torch.float16))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", dry_run.ARCHS)
def test_compiled_kernels_meet_the_requirements(arch):
    for variant in variants():
        kernel = compiled(arch, *variant)
        found = facts(kernel)
        assert not faults(kernel, arch), (variant, found)
        assert found.wide_loads > 0, (variant, found)
        assert found.tensor_core_ops > 0, (variant, found)


def test_sizes_compile_no_variants():
    """So the layers of a model share their kernels, and per-channel scales those of groups."""
    first = compiled(90, "int8", 1, 4096, 128, BF16)
    assert first.hash == compiled(90, "int8", 2, 11008, 11008, BF16).hash


def compiled(arch, kind, num_rows, num_inputs, group_size, dtype):
    columns = num_inputs // 2 if kind == "int4" else num_inputs
    codes = torch.empty(512, columns, dtype=torch.uint8)
    scales = torch.empty(num_inputs // group_size, 512)
    zeros = None if kind == "fp8" else torch.empty(scales.shape, dtype=torch.uint8)
    rows = torch.empty(num_rows, num_inputs, dtype=dtype)
    with dry_run.target(arch) as launches:
        quantized_linear(rows, codes, scales, zeros, None, kind, group_size)
    (launch,) = launches
    return launch.kernel
