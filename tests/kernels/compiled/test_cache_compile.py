"""Cache writes, block copy and swap, compiled for every GPU.

Requirements: no spills, and loads and stores of 16 bytes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch

from kernels import dry_run
from kernels.arguments import BLOCK_SIZES, HEAD_DIMS
from kernels.cache.block_copy import copy_blocks
from kernels.cache.cache_table import cache_table
from kernels.cache.cache_write import write_kv
from kernels.cache.rotary_cache_write import rotary_write_kv
from kernels.cache.swap import gather_blocks, scatter_blocks
from tests.kernels.caches import make_cache
from tests.kernels.compiled.gpus import ALL, ARCHS
from tests.kernels.compiled.static_check import facts, faults
from tests.kernels.compiled.variants import covering, parameter

pytestmark = pytest.mark.timeout(1800)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PARAMETERS = (
    # Numbers of heads that are powers of two fill a token's tiles.
    parameter("heads", [1], [2, 4, 8, 32], [3, 10, 18]),
    parameter("block_size", *([size] for size in BLOCK_SIZES)),
    parameter("slots", [torch.int64], [torch.int32]),
)


@dataclass(frozen=True)
class Write:
    dim: int
    rows: torch.dtype
    cache: torch.dtype
    heads: int = 8
    block_size: int = 16
    slots: torch.dtype = torch.int64
    layout: str = "NHD"

    def call(self) -> None:
        rows = torch.zeros(4, self.heads, self.dim, dtype=self.rows)
        shape = (4, self.block_size, self.heads, self.dim)
        cache = make_cache(*shape, self.cache, self.layout)
        slots = torch.arange(4, dtype=self.slots)
        write_kv(rows, rows, cache, cache, slots, key_scale=0.5, value_scale=0.25)

    def call_with_rotary(self) -> None:
        sizes = (4 * self.heads, self.heads, self.heads)
        rows = torch.zeros(4, sum(sizes), self.dim, dtype=self.rows).split(sizes, 1)
        shape = (4, self.block_size, self.heads, self.dim)
        cache = make_cache(*shape, self.cache, self.layout)
        slots = torch.arange(4, dtype=self.slots)
        cos, sin = torch.zeros(2, 4, self.dim // 2, dtype=self.rows)
        scales = {"key_scale": 0.5, "value_scale": 0.25}
        rotary_write_kv(*rows, cos, sin, self.dim, cache, cache, slots, **scales)


def cache_types(arch):
    """Return pairs (dtype of the rows, dtype of the cache)."""
    fp8 = (torch.uint8, torch.float8_e4m3fn) if arch >= 89 else (torch.uint8,)
    return [*((dtype, dtype) for dtype in DTYPES), *product(DTYPES, fp8)]


def sample(arch):
    usual = Write(128, torch.bfloat16, torch.bfloat16)
    shapes = [(32, 128), (4, 64), (32, 80), (8, 256), (1, 576)]
    return [
        usual,
        replace(usual, layout="HND", block_size=32, slots=torch.int32),
        *(replace(usual, heads=heads, dim=dim) for heads, dim in shapes),
        *(Write(128, *types) for types in cache_types(arch)[1:]),
    ]


def matrix(arch):
    """Return writes for each head dim and pair of dtypes, with each kind of each parameter."""
    writes = []
    for dim, types in product(HEAD_DIMS, cache_types(arch)):
        rng = random.Random(f"{arch} {dim} {types}")
        writes += [Write(dim, *types, **row) for row in covering(PARAMETERS, rng)]
    return writes


CASES = [(arch, write) for arch in ARCHS for write in (matrix if ALL else sample)(arch)]


@pytest.mark.parametrize(("arch", "write"), CASES, ids=str)
def test_write_kv(arch, write):
    # Wide access needs 16 bytes for each of the 32 threads of a warp.
    is_wide = write.heads * write.dim * write.cache.itemsize >= 512
    check(compiled(arch, write), arch, is_wide)


@pytest.mark.parametrize(("arch", "write"), CASES, ids=str)
def test_rotary_write_kv(arch, write):
    with dry_run.target(arch) as launches:
        write.call_with_rotary()
    (launch,) = launches
    found = facts(launch.kernel)
    assert not faults(launch.kernel, arch), found
    # A thread stores the 16-bit keys that it has loaded; it need not exchange them with others.
    assert not found.shared_bytes or write.rows.itemsize > 2, found
    # Half a row of 8-bit keys may be less than 16 bytes per thread.
    if write.dim % 32 == 0 and write.heads * write.dim * write.cache.itemsize >= 1024:
        assert min(found.wide_loads, found.wide_stores) > 0, found
        assert max(found.narrow_loads, found.narrow_stores) == 0, found


def test_the_layout_compiles_no_variants():
    """The matrix omits the layout, since only the strides' divisibility by 16 matters."""
    one = Write(80, torch.bfloat16, torch.bfloat16)
    (first,), (second,) = (compiled(90, write) for write in (one, replace(one, layout="HND")))
    assert first.kernel.hash == second.kernel.hash


@pytest.mark.parametrize("ids", [torch.int64, torch.int32])
@pytest.mark.parametrize("arch", ARCHS)
def test_block_moves(arch, ids):
    table = cache_table([make_cache(4, 16, 2, 64, torch.bfloat16, "NHD")] * 2)
    block_ids, staging = torch.tensor([1, 2]).to(ids), torch.zeros(2, table.words_per_block).long()
    with dry_run.target(arch) as launches:
        copy_blocks(table, torch.tensor([[1, 2]]).to(ids))
        gather_blocks(table, block_ids, staging)
        scatter_blocks(table, block_ids, staging)
    assert len(launches) == 3
    check(launches, arch)


def compiled(arch, write):
    with dry_run.target(arch) as launches:
        write.call()
    assert len(launches) == 1
    return launches


def check(launches, arch, is_wide=True):
    for launch in launches:
        found = facts(launch.kernel)
        assert not faults(launch.kernel, arch), (launch.name, found)
        if is_wide:
            assert min(found.wide_loads, found.wide_stores) > 0, (launch.name, found)
            assert max(found.narrow_loads, found.narrow_stores) == 0, (launch.name, found)
