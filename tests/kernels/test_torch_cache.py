"""The torch twins of the cache kernels, against plain loops."""

from __future__ import annotations

import pytest
import torch

from kernels.cache.cache_table import cache_table
from kernels.cache.torch_cache import copy_blocks, gather_blocks, scatter_blocks, write_kv
from tests.kernels.caches import bits, make_cache

FP8 = [torch.uint8, torch.float8_e4m3fn]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *FP8])
def test_write_kv(layout, dtype):
    rows = torch.randn(2, 5, 3, 8).to(torch.float32 if dtype in FP8 else dtype) * 100
    caches = [make_cache(4, 4, 3, 8, dtype, layout) for _ in range(2)]
    slots = torch.tensor([6, -1, 0, 15, -1])
    write_kv(*rows, *caches, slots, key_scale=0.5, value_scale=2.0)
    for given, cache, scale in zip(rows, caches, (0.5, 2.0), strict=True):
        expected = make_cache(4, 4, 3, 8, dtype, "NHD")
        for token in (0, 2, 3):
            row = given[token]
            if dtype in FP8:
                row = (row / scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(dtype)
            expected[slots[token] // 4, slots[token] % 4] = row
        assert torch.equal(bits(cache), bits(expected))


def make_layers(layout):
    """Return the K and V caches of two layers. V has fewer bytes than K."""
    shapes = [(8, torch.bfloat16), (4, torch.bfloat16), (8, torch.float32), (16, torch.uint8)]
    caches = [make_cache(6, 4, 2, dim, dtype, layout) for dim, dtype in shapes]
    for number, cache in enumerate(caches):
        for block in range(6):
            cache[block] = number * 10 + block
    return caches


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_copy_blocks(layout):
    caches = make_layers(layout)
    copy_blocks(cache_table(caches), torch.tensor([[1, 4], [1, 0], [5, 2]]))
    for number, cache in enumerate(caches):
        assert (cache[:, 0, 0, 0].float() - number * 10).tolist() == [1, 1, 5, 3, 1, 5]
        assert (cache == cache[:, :1, :1, :1]).all()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_gather_and_scatter_are_inverse(layout):
    caches = make_layers(layout)
    table = cache_table(caches)
    before = [cache.clone() for cache in caches]
    staging = torch.full((3, table.words_per_block), -1)
    block_ids = torch.tensor([4, 1])
    gather_blocks(table, block_ids, staging)
    assert (staging[2] == -1).all()
    for number, start in enumerate(table.starts.tolist()):
        as_type = staging[0, start:].view(caches[number].dtype)
        assert as_type[0] == number * 10 + 4
    for cache in caches:
        cache[[4, 1]] = 99
    scatter_blocks(table, torch.tensor([1, 4]), staging)
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache[[1, 4]], old[[4, 1]])
        assert torch.equal(cache[[0, 2, 3, 5]], old[[0, 2, 3, 5]])


def test_tables_reject_caches_that_kernels_cannot_move():
    with pytest.raises(ValueError, match="dense"):
        cache_table([torch.zeros(4, 4, 2, 16)[..., :8]])
    with pytest.raises(ValueError, match="16 bytes"):
        cache_table([torch.zeros(4, 1, 1, 2)])
    with pytest.raises(ValueError, match="16 bytes"):
        cache_table([torch.zeros(65)[1:].view(4, 4, 1, 4)])
