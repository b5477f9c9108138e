"""Attention kernels compiled for each GPU as the wrappers would launch them, and checked.

Requirements: no spills in loops, shared memory within the GPU's limit, 16-byte loads of K and V
and none of 1 or 2 bytes, tensor cores wherever the type has them. LONGSHORE_ALL_VARIANTS=1 checks
the whole matrix and not a sample of it (`make variants`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import asdict
from itertools import chain

import pytest
import torch

from benchmarks.gpu.occupancy import programs_per_processor
from kernels import dry_run
from kernels.arguments import BLOCK_SIZES, EXPANDED_DIMS, HEAD_DIMS, LATENT_DIMS
from kernels.attention.prefill_work import make_prefill_work
from kernels.attention.work_list import make_work_list
from kernels.configurations import attention_configuration
from tests.kernels.compiled import variants
from tests.kernels.compiled.gpus import ALL, ARCHS
from tests.kernels.compiled.static_check import (
    Pipeline,
    facts,
    faults,
    loop_instructions,
    pipeline,
)

pytestmark = pytest.mark.timeout(1800)
SELECTED = variants.matrix if ALL else variants.representative
CASES = [(arch, variant) for arch in ARCHS for variant in SELECTED(arch)]
ATTENTION = ("paged_decode_kernel", "paged_prefill_kernel")
MOST_NARROW_LOADS = {False: 0, True: 8}
"""Maximum, without and with sinks. A thread reads the sinks of its rows before the loop."""


@pytest.mark.parametrize(("arch", "variant"), CASES, ids=str)
def test_compiled_kernels_meet_the_requirements(arch, variant):
    launches = compiled(arch, variant)
    assert launches
    for launch in launches:
        found = facts(launch.kernel)
        assert not faults(launch.kernel, arch), found
        if launch.name in ATTENTION:
            assert found.wide_loads > 0, found
            assert found.narrow_loads <= MOST_NARROW_LOADS[variant.sinks], found
            assert found.tensor_core_ops > 0 or variant.formats[0] == torch.float32, found


@pytest.mark.matrix
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize(
    ("arch", "kernel", "formats", "buffers", "wait_depth"),
    [
        (90, "prefill", 0, 3, 2),  # 128x64 tiles, 3 stages
        (90, "decode", 0, 2, 2),  # 3 stages
        (90, "decode", 5, 2, 2),
        (90, "prefill", 5, 2, 2),
        (80, "prefill", 0, 2, 2),  # 64x64 tiles, 3 stages
        (80, "decode", 0, 2, 2),
        (86, "decode", 0, 1, 0),  # 2 stages, so that two programs fit
        (86, "decode", 3, 2, 2),
    ],
)
def test_tiles_are_loaded_ahead_by_num_stages(
    arch, kernel, formats, buffers, wait_depth, block_size
):
    """If K and V addresses depended on a load of the same iteration, Triton would load fewer tiles
    ahead, whatever num_stages says."""
    variant = variants.Variant(kernel, 128, variants.FORMATS[formats], block_size=block_size)
    (launch,) = compiled(arch, variant)
    assert pipeline(launch.kernel) == Pipeline({buffers}, wait_depth)
    assert not faults(launch.kernel, arch)


@pytest.mark.parametrize(
    ("arch", "formats", "most"),
    [
        (90, 0, 55),  # bf16
        (90, 5, 180),  # e4m3; with 8 warps and bf16 products, it would be 258
        (89, 5, 180),
        (80, 3, 235),  # e4m3 in uint8; with 8 warps and bf16 products, it would be 404
        (86, 3, 235),
    ],
)
def test_instructions_for_a_kilobyte_of_keys_and_values(arch, formats, most):
    """In a nanosecond, a multiprocessor of an H200 executes about 7 instructions. In that time, it
    should read 33 bytes, so that all 132 multiprocessors read 4.4 TB/s."""
    variant = variants.Variant("decode", 128, variants.FORMATS[formats])
    (launch,) = compiled(arch, variant)
    kilobytes = 2 * 64 * 128 * variant.formats[1].itemsize / 1024
    executed = loop_instructions(launch.kernel) * launch.kernel.metadata.num_warps
    assert executed / kilobytes <= most


@pytest.mark.matrix
@pytest.mark.parametrize("group", [4, 13, 24, 48])
@pytest.mark.parametrize(
    ("arch", "head_dim", "formats"),
    [
        (90, 128, 0), (90, 64, 0), (90, 256, 0), (90, 128, 5), (90, 64, 5), (90, 80, 5),
        (80, 128, 0), (80, 64, 0), (80, 128, 3), (86, 128, 0), (86, 128, 3), (86, 64, 3),
    ],
)  # fmt: skip
def test_as_many_decodes_fit_as_the_table_says(arch, head_dim, formats, group):
    """If the table were wrong, the splits that are meant to fill the GPU would not run at once, or
    would not fill it."""
    query, cache = variants.FORMATS[formats]
    (launch,) = compiled(arch, variants.Variant("decode", head_dim, (query, cache), group))
    assert not faults(launch.kernel, arch)
    with dry_run.target(arch):
        row = attention_configuration("decode", head_dim, group, query, cache)
        assert programs_per_processor(launch.kernel) == row.programs_per_processor


@pytest.mark.matrix
@pytest.mark.parametrize("formats", [0, 1, 3, 5])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"block_size": 64},
        {"group": 7, "window": 1000, "softcap": 30.0, "sinks": True},
        {"group": 71, "kv_heads": 1},
    ],
    ids=str,
)
def test_two_prefills_with_head_dim_64_fit_on_sm_90(options, formats):
    """The table limits registers to 128. With fp8 caches, the compiler would use more."""
    variant = variants.Variant("prefill", 64, variants.FORMATS[formats], **options)
    (launch,) = compiled(90, variant)
    assert not faults(launch.kernel, 90), facts(launch.kernel)
    with dry_run.target(90):
        row = attention_configuration("prefill", 64, variant.group, *variant.formats)
        assert programs_per_processor(launch.kernel) == row.programs_per_processor == 2


@pytest.mark.matrix
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("lens", [torch.int32, torch.int64])
def test_work_lists_are_made_in_registers(arch, lens):
    with dry_run.target(arch) as launches:
        make_work_list(torch.ones(5, dtype=lens), 7)
        make_prefill_work(torch.arange(6, dtype=lens), torch.ones(5, dtype=lens), (4, 64), 9, 7)
    decode, prefill = launches
    assert decode.grid == (5,), "a program for each of 5 sequences"
    assert prefill.grid == (7,), "a program for each block: 9 tokens have up to 9 // 4 + 5"
    for launch in launches:
        assert not faults(launch.kernel, arch), facts(launch.kernel)


@pytest.mark.parametrize("kernel", ["decode", "prefill"])
def test_kv_heads_and_layout_compile_no_variants(kernel):
    """The matrix omits KV heads and layout: only the strides' divisibility by 16 matters."""
    one = variants.Variant(kernel, 80, kv_heads=3, layout="NHD")
    other = variants.Variant(kernel, 80, kv_heads=1, layout="HND")
    first, second = ([launch.kernel.hash for launch in compiled(90, v)] for v in (one, other))
    assert first == second


@pytest.mark.parametrize("archs", [(80, 86, 89), (90,)], ids=str)
def test_the_matrix_has_every_kind_of_every_parameter(archs):
    rows = defaultdict(list)
    for variant in chain.from_iterable(map(variants.matrix, archs)):
        dims = variant.head_dim, variant.value_dim
        rows[variant.kernel, dims, variant.formats].append(asdict(variant).items())
    kernels = Counter(kernel for kernel, *_ in rows)
    for kernel in variants.PARAMETERS:
        count = 3 if kernel.startswith("combine") else len(variants.FORMATS)
        has_latents = kernel in ("decode", "prefill")
        dims = HEAD_DIMS + (LATENT_DIMS if has_latents else ())
        num_expanded = 3 * len(EXPANDED_DIMS) if kernel == "prefill" else 0
        assert kernels[kernel] == count * len(dims) + num_expanded
    for (kernel, *_), members in rows.items():
        for kind in chain.from_iterable(variants.PARAMETERS[kernel]):
            assert any(value.items() <= member for value in kind for member in members), kind


def compiled(arch, variant):
    with dry_run.target(arch) as launches:
        variant.call()
    return launches
