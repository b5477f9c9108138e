"""The KV cache's tensors."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch

from core.configuration.kv_layout import KVLayout, LayerShape
from engine.attention.kv_cache import POPULATE_BYTES, KVCache

LAYOUT = KVLayout.uniform(16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_on_a_cpu_the_slots_of_one_head_in_a_block_are_contiguous_and_zero(dtype):
    cache = KVCache(
        [LayerShape(2, 8, 4), LayerShape(1, 16, 16)],
        5,
        KVLayout.uniform(4),
        dtype,
        torch.device("cpu"),
    )
    shapes = [(5, 4, 2, 8), (5, 4, 1, 16), (5, 4, 2, 4), (5, 4, 1, 16)]
    for tensor, shape in zip(cache.keys + cache.values, shapes, strict=True):
        assert tensor.shape == shape
        assert tensor.dtype == dtype
        assert tensor[3, :, -1].is_contiguous()
        assert not tensor.any()
    cache.keys[0][4, 3, 1] = 1
    assert cache.keys[0].sum() == 8
    assert not any(part.any() for part in (cache.keys[1], *cache.values))


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.fixture
def nothing_in_the_background():
    """Wait until caches of earlier tests are populated: their memory is freed only then."""
    for thread in threading.enumerate():
        if thread.name == "populate-kv":
            thread.join()
    gc.collect()


def make_large():
    """Return a cache of 128 MiB."""
    return KVCache([LayerShape(2, 64, 64)] * 2, 4096, LAYOUT, torch.float32, torch.device("cpu"))


@pytest.mark.usefixtures("nothing_in_the_background")
def test_on_a_cpu_memory_is_populated_in_the_background():
    """Steps may write to the cache in the meantime; their data is kept."""
    before, cache = resident(), make_large()
    cache.keys[0].fill_(7)
    deadline = time.monotonic() + 60
    while resident() - before < 0.9 * 128 * 2**20:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert (cache.keys[0] == 7).all()
    assert not any(tensor.any() for tensor in (cache.keys[1], *cache.values))


@pytest.mark.usefixtures("nothing_in_the_background")
def test_memory_is_written_at_once_if_the_kernel_cannot_populate_it(monkeypatch):
    monkeypatch.setattr("engine.attention.kv_cache.MADV_POPULATE_WRITE", 9999)
    before, cache = resident(), make_large()
    assert resident() - before > 0.9 * 128 * 2**20
    assert not cache.values[1].any()


@pytest.mark.usefixtures("nothing_in_the_background")
def test_a_cache_that_is_dropped_is_populated_no_further(monkeypatch):
    populated, may_go_on = [], threading.Event()

    def populate(piece):
        populated.append(len(piece))
        if len(populated) > 1:  # in the thread
            assert may_go_on.wait(60)
        return 0

    monkeypatch.setattr("engine.attention.kv_cache._populate", populate)
    make_large()
    gc.collect()
    may_go_on.set()
    for thread in threading.enumerate():
        if thread.name == "populate-kv":
            thread.join()
    assert len(populated) <= 2 < 128 * 2**20 // POPULATE_BYTES


def test_huge_pages_are_optional(monkeypatch):
    def cache():
        return KVCache([LayerShape(2, 64, 64)], 8, LAYOUT, torch.float32, torch.device("cpu"))

    monkeypatch.setattr("mmap.MADV_HUGEPAGE", 9999, raising=False)
    assert not cache().keys[0].any()
    monkeypatch.delattr("mmap.MADV_HUGEPAGE")
    assert not cache().keys[0].any()
