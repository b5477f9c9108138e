"""Attention kernels compiled for each GPU as the wrappers would launch them, and looked at.

What must hold: no spills, no stack, shared memory within the GPU's limit, 16-byte loads of K and V
and none of 1 or 2 bytes, tensor cores wherever the type has them. LONGSHORE_ALL_VARIANTS=1 checks
the whole matrix and not a sample of it (`make kernels`).
"""

from __future__ import annotations

import os

import pytest
import torch

from tests.kernels import dry_run, variants
from tests.kernels.static_check import facts, faults

ALL = os.environ.get("LONGSHORE_ALL_VARIANTS") == "1"
SELECTED = variants.matrix if ALL else variants.representative
CASES = [(arch, variant) for arch in dry_run.ARCHS for variant in SELECTED(arch)]
ATTENTION = ("paged_decode_kernel", "paged_prefill_kernel")
MOST_NARROW_LOADS = {False: 0, True: 8}
"""Without and with sinks, of which a thread reads those of its rows, once, before the loop."""


@pytest.mark.parametrize(("arch", "variant"), CASES, ids=str)
def test_compiles_to_what_it_should(arch, variant):
    with dry_run.target(arch) as launches:
        variant.call()
    assert launches
    has_sinks = "sinks" in variants.EXTRAS[variant.extras]
    for launch in launches:
        found = facts(launch.kernel)
        assert not faults(launch.kernel, arch), found
        if launch.name in ATTENTION:
            assert found.wide_loads > 0, found
            assert found.narrow_loads <= MOST_NARROW_LOADS[has_sinks], found
            assert found.tensor_core_ops > 0 or variant.formats[0] == torch.float32, found
