"""write_kv in Triton's interpreter, bit for bit against its torch twin; see ../conftest.py."""

from __future__ import annotations

import pytest
import torch

from kernels.cache import torch_cache
from kernels.cache.cache_write import write_kv
from tests.kernels.caches import bits, make_cache

SLOTS = torch.tensor([33, -1, 0, 47, 16, -1, 15])
FP8 = [torch.uint8, torch.float8_e4m3fn]


def check(key, value, cache_dtype, layout="NHD", block_size=16, slots=SLOTS, **scales):
    results = []
    for write in (write_kv, torch_cache.write_kv):
        caches = [
            make_cache(64 // block_size, block_size, *rows.shape[1:], cache_dtype, layout)
            for rows in (key, value)
        ]
        write(key, value, *caches, slots, **scales)
        results.append([bits(cache) for cache in caches])
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)


def make_rows(heads, dim, dtype):
    return torch.randn(len(SLOTS), heads, dim).mul(3).to(dtype)


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("heads", "dim"), [(2, 64), (3, 80), (1, 256), (20, 128)])
def test_shapes_and_dtypes(heads, dim, dtype, layout):
    check(make_rows(heads, dim, dtype), make_rows(heads, dim, dtype), dtype, layout)


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_block_sizes(block_size):
    rows = make_rows(2, 64, torch.bfloat16)
    check(rows, rows + 1, torch.bfloat16, "HND", block_size)


@pytest.mark.matrix
@pytest.mark.parametrize("cache_dtype", FP8)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_fp8_is_rounded_and_saturated(dtype, cache_dtype):
    key, value = make_rows(2, 64, dtype), make_rows(2, 64, dtype) / 500
    key[0, 0, :3] = torch.tensor([60000.0, -60000.0, 0.0])
    check(key, value, cache_dtype, key_scale=0.03, value_scale=0.125)


def test_values_narrower_than_keys():
    check(make_rows(2, 192, torch.bfloat16), make_rows(2, 128, torch.bfloat16), torch.bfloat16)


def test_rows_inside_a_fused_projection():
    """K and V may be slices of rows that hold a token's Q, K and V side by side, or views of
    [heads, T, dim], as transformers produces them."""
    fused = torch.randn(len(SLOTS), 8, 64).bfloat16()
    check(fused[:, 4:6], fused[:, 6:], torch.bfloat16)
    by_head = torch.randn(2, len(SLOTS), 64).bfloat16().transpose(0, 1)
    check(by_head, by_head, torch.bfloat16)


def test_int32_slots_and_no_tokens():
    rows = make_rows(2, 64, torch.bfloat16)
    check(rows, rows, torch.bfloat16, slots=SLOTS.int())
    check(rows[:0], rows[:0], torch.bfloat16, slots=SLOTS[:0])


def test_invalid_dtypes_and_strides_are_errors():
    rows, slots = make_rows(2, 64, torch.bfloat16), SLOTS
    cache = make_cache(4, 16, 2, 64, torch.float16, "NHD")
    with pytest.raises(ValueError, match="cannot write"):
        write_kv(rows, rows, cache, cache, slots)
    with pytest.raises(ValueError, match="contiguous"):
        write_kv(rows.half().transpose(1, 2), rows.half(), cache, cache, slots)
