"""The tensors of K and V."""

from __future__ import annotations

import pytest
import torch

from core.sizing import LayerShape
from engine.kv_cache import KVCache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_on_a_cpu_a_heads_part_of_a_block_is_one_run_of_zeros(dtype):
    cache = KVCache([LayerShape(2, 8, 4), LayerShape(1, 16, 16)], 5, 4, dtype, torch.device("cpu"))
    shapes = [(5, 4, 2, 8), (5, 4, 1, 16), (5, 4, 2, 4), (5, 4, 1, 16)]
    for tensor, shape in zip(cache.keys + cache.values, shapes, strict=True):
        assert tensor.shape == shape
        assert tensor.dtype == dtype
        assert tensor[3, :, -1].is_contiguous()
        assert not tensor.any()
    cache.keys[0][4, 3, 1] = 1
    assert cache.keys[0].sum() == 8
    assert not any(each.any() for each in (cache.keys[1], *cache.values))


def test_on_a_cpu_its_memory_is_there_from_the_start():
    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    before = resident()
    cache = KVCache([LayerShape(2, 64, 64)] * 2, 512, 16, torch.float32, torch.device("cpu"))
    num_bytes = sum(each.numel() * each.element_size() for each in cache.keys + cache.values)
    assert resident() - before > 0.9 * num_bytes


def test_a_kernel_without_huge_pages_is_no_error(monkeypatch):
    def cache():
        return KVCache([LayerShape(2, 64, 64)], 8, 16, torch.float32, torch.device("cpu"))

    monkeypatch.setattr("mmap.MADV_HUGEPAGE", 9999, raising=False)
    assert not cache().keys[0].any()
    monkeypatch.delattr("mmap.MADV_HUGEPAGE")
    assert not cache().keys[0].any()
