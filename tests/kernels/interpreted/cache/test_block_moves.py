"""copy_blocks, gather_blocks and scatter_blocks in the interpreter, against their torch twins."""

from __future__ import annotations

import pytest
import torch

from kernels.cache import block_copy, swap, torch_cache
from kernels.cache.cache_table import cache_table
from tests.kernels.caches import bits, make_cache

CACHES = [  # (heads, dim, dtype): blocks of 17,408, 8,704 and 16 bytes; a tile has 8 KiB
    (4, 136, torch.bfloat16),
    (4, 136, torch.uint8),
    (1, 1, torch.uint8),
]


def make_table(layout, seed=0):
    generator = torch.Generator().manual_seed(seed)
    caches = []
    for heads, dim, dtype in CACHES:
        cache = make_cache(7, 16, heads, dim, dtype, layout)
        content = torch.randint(0, 100, cache.shape, generator=generator)
        cache.copy_(content.to(dtype))
        caches.append(cache)
    return cache_table(caches)


def equal(table, other):
    pairs = zip(table.caches, other.caches, strict=True)
    return all(torch.equal(bits(mine), bits(theirs)) for mine, theirs in pairs)


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_copy_blocks(layout, dtype):
    mine, twin = make_table(layout), make_table(layout)
    pairs = torch.tensor([[6, 0], [6, 3], [1, 2]], dtype=dtype)
    block_copy.copy_blocks(mine, pairs)
    assert not equal(mine, twin)
    torch_cache.copy_blocks(twin, pairs)
    assert equal(mine, twin)
    block_copy.copy_blocks(mine, pairs[:0])
    assert equal(mine, twin)


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_gather_and_scatter(layout, dtype):
    table, twin = make_table(layout), make_table(layout)
    block_ids = torch.tensor([5, 0, 3], dtype=dtype)
    staging, expected = (torch.full((4, table.words_per_block), -1) for _ in range(2))
    swap.gather_blocks(table, block_ids, staging)
    torch_cache.gather_blocks(twin, block_ids, expected)
    assert torch.equal(staging, expected)
    assert equal(table, twin)
    swap.scatter_blocks(table, block_ids.flip(0), staging)
    torch_cache.scatter_blocks(twin, block_ids.flip(0), staging)
    assert equal(table, twin)


def test_staging_of_another_shape_is_an_error():
    table, block_ids = make_table("NHD"), torch.tensor([1, 2])
    with pytest.raises(ValueError, match="2 rows"):
        swap.gather_blocks(table, block_ids, torch.zeros(1, table.words_per_block).long())
    with pytest.raises(ValueError, match="rows of"):
        swap.gather_blocks(table, block_ids, torch.zeros(2, 4).long())
