"""Attention kernels compiled for each GPU as the wrappers would launch them, and looked at.

What must hold: no spills, no stack, shared memory within the GPU's limit, 16-byte loads of K and V
and none of 1 or 2 bytes, tensor cores wherever the type has them. LONGSHORE_ALL_VARIANTS=1 checks
the whole matrix and not a sample of it (`make variants`).
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from dataclasses import asdict
from itertools import chain

import pytest
import torch

from kernels import dry_run
from kernels.paged_arguments import HEAD_DIMS
from tests.kernels import variants
from tests.kernels.static_check import facts, faults

ALL = os.environ.get("LONGSHORE_ALL_VARIANTS") == "1"
SELECTED = variants.matrix if ALL else variants.representative
CASES = [(arch, variant) for arch in dry_run.ARCHS for variant in SELECTED(arch)]
ATTENTION = ("paged_decode_kernel", "paged_prefill_kernel")
MOST_NARROW_LOADS = {False: 0, True: 8}
"""Without and with sinks, of which a thread reads those of its rows, once, before the loop."""


@pytest.mark.parametrize(("arch", "variant"), CASES, ids=str)
def test_compiles_to_what_it_should(arch, variant):
    launches = compiled(arch, variant)
    assert launches
    for launch in launches:
        found = facts(launch.kernel)
        assert not faults(launch.kernel, arch), found
        if launch.name in ATTENTION:
            assert found.wide_loads > 0, found
            assert found.narrow_loads <= MOST_NARROW_LOADS[variant.sinks], found
            assert found.tensor_core_ops > 0 or variant.formats[0] == torch.float32, found


@pytest.mark.parametrize("kernel", ["decode", "prefill"])
def test_kv_heads_and_layout_make_no_variants(kernel):
    """So the matrix leaves them out: strides are multiples of 16, which is all that counts."""
    one = variants.Variant(kernel, 80, kv_heads=3, layout="NHD")
    other = variants.Variant(kernel, 80, kv_heads=1, layout="HND")
    first, second = ([launch.kernel.hash for launch in compiled(90, v)] for v in (one, other))
    assert first == second


@pytest.mark.parametrize(("arch", "num_formats"), [(80, 5), (86, 5), (89, 7), (90, 7)])
def test_the_matrix_has_every_kind_of_every_parameter(arch, num_formats):
    rows = defaultdict(list)
    for variant in variants.matrix(arch):
        rows[variant.kernel, variant.head_dim, variant.formats].append(asdict(variant).items())
    kernels = Counter(kernel for kernel, *_ in rows)
    for kernel, count in {"decode": num_formats, "prefill": num_formats, "combine": 3}.items():
        assert kernels[kernel] == count * len(HEAD_DIMS)
    for (kernel, *_), members in rows.items():
        for kind in chain.from_iterable(variants.PARAMETERS[kernel]):
            assert any(value.items() <= member for value in kind for member in members), kind


def compiled(arch, variant):
    with dry_run.target(arch) as launches:
        variant.call()
    return launches
