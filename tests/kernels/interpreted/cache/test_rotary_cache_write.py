"""rotary_write_kv in Triton's interpreter, bit for bit against rotary and then write_kv."""

from __future__ import annotations

import pytest
import torch

from kernels.cache import torch_cache
from kernels.cache.cache_write import write_kv
from kernels.cache.rotary_cache_write import rotary_write_kv
from kernels.elementwise import rotary, torch_elementwise
from tests.kernels.caches import bits, make_cache
from tests.kernels.elementwise_inputs import strided

SLOTS = torch.tensor([33, -1, 0, 47, 16, -1, 15])
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
FP8 = [torch.uint8, torch.float8_e4m3fn]
SCALES = {"key_scale": 0.03, "value_scale": 0.125}


def merged(heads, head_dim, dtype):
    """Return queries, keys and values as slices of one projection, with NaN around them."""
    num_heads, num_kv_heads = heads
    rows = strided(len(SLOTS), num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    return rows.split((num_heads, num_kv_heads, num_kv_heads), 1)


def angles(num_tokens, width, dtype):
    angle = torch.rand(num_tokens, width, generator=torch.Generator().manual_seed(3)) * 7
    return angle.cos().to(dtype), angle.sin().to(dtype)


def two_launches(query, key, value, cos, sin, rotary_dim, *caches_and_slots, **scales):
    """Run the two separate Triton kernels. Unlike torch, they may fuse an fp32 product and sum."""
    rotary.rotary(query, key, cos, sin, rotary_dim)
    write_kv(key, value, *caches_and_slots, **scales)


def in_torch(query, key, value, cos, sin, rotary_dim, *caches_and_slots, **scales):
    torch_elementwise.rotary(query, key, cos, sin, rotary_dim)
    torch_cache.write_kv(key, value, *caches_and_slots, **scales)


def check(rows, rotary_dim, cache_dtype, *, width=None, layout="NHD", block_size=16, **scales):
    """Compare the fused kernel with two launches and, unless the dtype is fp32, with torch.

    All blocks are poisoned first, so that a write outside of the slots shows.
    """
    dtype, num_tokens = rows[0].dtype, rows[0].shape[0]
    cos, sin = angles(num_tokens, width or rotary_dim // 2, dtype)
    results = []
    for function in (rotary_write_kv, two_launches, in_torch):
        query, key, value = (part.clone() for part in rows)
        caches = [
            make_cache(64 // block_size, block_size, *part.shape[1:], cache_dtype, layout)
            for part in (key, value)
        ]
        slots = SLOTS[:num_tokens]
        function(query, key, value, cos, sin, rotary_dim, *caches, slots, **scales)
        results.append([bits(tensor) for tensor in (query, *caches)])
        if function is rotary_write_kv:
            assert torch.equal(key, rows[1])
            assert torch.equal(value, rows[2])
    fused, *references = results
    for reference in references if dtype != torch.float32 else references[:1]:
        for got, expected in zip(fused, reference, strict=True):
            assert torch.equal(got, expected)


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "head_dim", "rotary_dim"),
    [((4, 2), 64, 64), ((3, 1), 80, 80), ((33, 3), 128, 128), ((1, 1), 256, 256), ((2, 5), 8, 8),
     ((4, 2), 96, 72), ((4, 2), 64, 16), ((20, 20), 128, 128)],
)  # fmt: skip
def test_shapes_and_dtypes(heads, head_dim, rotary_dim, dtype):
    for width in (rotary_dim, rotary_dim // 2):
        check(merged(heads, head_dim, dtype), rotary_dim, dtype, width=width)


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_layouts_and_block_sizes(layout, block_size):
    rows = merged((4, 2), 64, torch.bfloat16)
    check(rows, 64, torch.bfloat16, layout=layout, block_size=block_size)


@pytest.mark.matrix
@pytest.mark.parametrize("cache_dtype", FP8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary_dim", [64, 48])
def test_fp8_keys_are_first_rounded_to_the_rows_dtype(dtype, cache_dtype, rotary_dim):
    check(merged((4, 2), 64, dtype), rotary_dim, cache_dtype, **SCALES)


def test_separate_rows_as_after_norms():
    query, key, value = merged((6, 2), 64, torch.bfloat16)
    check((query.contiguous(), key.contiguous(), value), 64, torch.bfloat16)


def test_values_narrower_than_keys():
    query, key, value = merged((2, 2), 64, torch.bfloat16)
    check((query, key, value[..., :32]), 64, torch.bfloat16)


def test_every_query_is_rotated_and_no_padding_written():
    query, key, value = merged((2, 1), 64, torch.bfloat16)
    before = query.clone()
    caches = [make_cache(4, 16, 1, 64, torch.bfloat16, "NHD") for _ in range(2)]
    untouched = [bits(cache) for cache in caches]
    cos, sin = angles(len(SLOTS), 32, torch.bfloat16)
    slots = torch.full_like(SLOTS, -1)
    rotary_write_kv(query, key, value, cos, sin, 64, *caches, slots)
    assert (query != before).any(-1).all()
    for cache, old in zip(caches, untouched, strict=True):
        assert torch.equal(bits(cache), old)


def test_int32_slots_and_no_tokens():
    rows = merged((2, 1), 64, torch.bfloat16)
    cos, sin = angles(len(SLOTS), 32, torch.bfloat16)
    caches = [make_cache(4, 16, 1, 64, torch.bfloat16, "NHD") for _ in range(2)]
    none = (part[:0] for part in rows)
    rotary_write_kv(*none, cos[:0], sin[:0], 64, *caches, SLOTS[:0])
    rotary_write_kv(*(part.clone() for part in rows), cos, sin, 64, *caches, SLOTS.int())
    expected = [make_cache(4, 16, 1, 64, torch.bfloat16, "NHD") for _ in range(2)]
    in_torch(*(part.clone() for part in rows), cos, sin, 64, *expected, SLOTS)
    for cache, other in zip(caches, expected, strict=True):
        assert torch.equal(bits(cache), bits(other))


def test_invalid_arguments_are_errors():
    query, key, value = merged((2, 1), 64, torch.bfloat16)
    cos, sin = angles(len(SLOTS), 32, torch.bfloat16)
    cache = make_cache(4, 16, 1, 64, torch.bfloat16, "NHD")
    with pytest.raises(ValueError, match="cannot write"):
        rotary_write_kv(query, key, value, cos, sin, 64, cache.half(), cache, SLOTS)
    with pytest.raises(ValueError, match="for 7 tokens"):
        rotary_write_kv(query, key, value, cos[:2], sin[:2], 64, cache, cache, SLOTS)
    with pytest.raises(ValueError, match="dims / 2"):
        rotary_write_kv(query, key, value, cos, sin, 66, cache, cache, SLOTS)
    with pytest.raises(ValueError, match="contiguous"):
        rotary_write_kv(query, key, value.transpose(1, 2), cos, sin, 64, cache, cache, SLOTS)
