"""Cache write, block copy and swap compiled for every GPU: no spills, 16 bytes a load and store."""

from __future__ import annotations

import os
from itertools import product

import pytest
import torch

from kernels.block_copy import copy_blocks
from kernels.cache_table import cache_table
from kernels.cache_write import write_kv
from kernels.paged_arguments import HEAD_DIMS
from kernels.swap import gather_blocks, scatter_blocks
from tests.kernels import dry_run
from tests.kernels.caches import make_cache
from tests.kernels.static_check import facts, faults

ALL = os.environ.get("LONGSHORE_ALL_VARIANTS") == "1"
SHAPES = [(8, 128), (32, 128), (4, 64), (32, 80), (8, 256), (1, 576)]
ALL_SHAPES = [*product((1, 8, 32), HEAD_DIMS), *SHAPES]


def write(heads, dim, dtype, cache_dtype, layout="NHD"):
    rows = torch.zeros(4, heads, dim, dtype=dtype)
    cache = make_cache(4, 16, heads, dim, cache_dtype, layout)
    write_kv(rows, rows, cache, cache, torch.arange(4), key_scale=0.5, value_scale=0.25)


def cache_types(arch):
    """(type of the rows, type of the cache)."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    fp8 = (torch.uint8, torch.float8_e4m3fn) if arch >= 89 else (torch.uint8,)
    mixed = product(dtypes if ALL else dtypes[:1], fp8)
    return [*((dtype, dtype) for dtype in dtypes), *mixed]


def variants(arch):
    if ALL:
        shapes = product(ALL_SHAPES, cache_types(arch), ("NHD", "HND"))
        return [(*shape, *types, layout) for shape, types, layout in shapes]
    return [
        *((*shape, *cache_types(arch)[0], "NHD") for shape in SHAPES),
        *((8, 128, *types, "NHD") for types in cache_types(arch)[1:]),
        (8, 128, *cache_types(arch)[0], "HND"),
    ]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", dry_run.ARCHS)
def test_write_kv(arch):
    for variant in variants(arch):
        with dry_run.target(arch) as launches:
            write(*variant)
        heads, dim, _, cache_dtype, _ = variant
        # Less than 16 bytes for each thread of a warp cannot be wide.
        check(launches, arch, variant, is_wide=heads * dim * cache_dtype.itemsize >= 512)


@pytest.mark.parametrize("arch", dry_run.ARCHS)
def test_block_moves(arch):
    table = cache_table([make_cache(4, 16, 2, 64, torch.bfloat16, "NHD")] * 2)
    block_ids, staging = torch.tensor([1, 2]), torch.zeros(2, table.words_per_block).long()
    with dry_run.target(arch) as launches:
        copy_blocks(table, torch.tensor([[1, 2]]))
        gather_blocks(table, block_ids, staging)
        scatter_blocks(table, block_ids, staging)
    assert len(launches) == 3
    check(launches, arch, None)


def check(launches, arch, variant, is_wide=True):
    for launch in launches:
        found, where = facts(launch.kernel), (launch.name, variant)
        assert not faults(launch.kernel, arch), where
        if not is_wide:
            continue
        assert min(found.wide_loads, found.wide_stores) > 0, (where, found)
        assert max(found.narrow_loads, found.narrow_stores) == 0, (where, found)
