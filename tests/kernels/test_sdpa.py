"""Paged attention against its fp64 definition, with everything unused poisoned."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.attention.batch import ImageSpan, PagedBatch
from kernels.attention.sdpa import Scratch, attend_in_images, paged_attention
from kernels.cache.torch_cache import write_kv
from tests.kernels.reference import paged_attention_reference

BLOCK_SIZE = 4


def make_batch(lengths, generator):
    """Return a batch of (num_new, num_cached) pairs in shuffled blocks, and the cache's length."""
    contexts = [new + cached for new, cached in lengths]
    num_blocks = [-(-context // BLOCK_SIZE) for context in contexts]
    free = torch.randperm(sum(num_blocks) + 3, generator=generator).tolist()
    tables = torch.zeros(len(lengths), max(num_blocks), dtype=torch.int64)
    slots, spans, start = [], [], 0
    for row, (new, cached) in enumerate(lengths):
        table = [free.pop() for _ in range(num_blocks[row])]
        tables[row, : len(table)] = torch.tensor(table)
        positions = range(cached, cached + new)
        slots += [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in positions]
        spans.append((start, start + new, contexts[row]))
        start += new
    starts = torch.tensor([0] + [end for _, end, _ in spans], dtype=torch.int32)
    batch = PagedBatch(starts, torch.tensor(contexts), tables, torch.tensor(slots), tuple(spans))
    return batch, sum(num_blocks) + 3


def poisoned_cache(batch, num_blocks, kv_heads, dim, dtype, generator):
    """Return a cache with NaN in every slot that no sequence's context covers."""
    cache = torch.full((num_blocks, BLOCK_SIZE, kv_heads, dim), float("nan"), dtype=dtype)
    for row, (_, _, context) in enumerate(batch.spans):
        for position in range(context):
            block = batch.block_tables[row, position // BLOCK_SIZE]
            cache[block, position % BLOCK_SIZE] = torch.randn(
                kv_heads, dim, generator=generator
            ).to(dtype)
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize(
    "extras", [{}, {"window": 3}, {"window": 8}, {"softcap": 5.0}, {"sinks": True, "window": 5}]
)
def test_against_the_definition(dtype, heads, extras):
    generator = torch.Generator().manual_seed(1)
    batch, num_blocks = make_batch(
        [(1, 0), (1, 3), (1, 4), (1, 17), (9, 0), (4, 0), (5, 6), (3, 9)], generator
    )
    num_heads, kv_heads = heads
    query = torch.randn(25, num_heads, 16, generator=generator).to(dtype)
    keys = poisoned_cache(batch, num_blocks, kv_heads, 16, dtype, generator)
    values = poisoned_cache(batch, num_blocks, kv_heads, 8, dtype, generator)
    options = extras | {"scale": 0.3}
    if "sinks" in options:
        options["sinks"] = torch.randn(num_heads, generator=generator)
    got = paged_attention(query, keys, values, batch, Scratch(), **options)
    expected = paged_attention_reference(query, keys, values, batch, **options)
    tolerance = 1e-5 if dtype == torch.float32 else 4e-2
    torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)


def test_write_kv_writes_only_its_slots():
    generator = torch.Generator().manual_seed(2)
    batch, num_blocks = make_batch([(3, 2), (1, 4)], generator)
    key, value = (
        torch.randn(4, 2, 8, generator=generator),
        torch.randn(4, 2, 6, generator=generator),
    )
    key_cache = torch.zeros(num_blocks, BLOCK_SIZE, 2, 8)
    value_cache = torch.zeros(num_blocks, BLOCK_SIZE, 2, 6)
    write_kv(key, value, key_cache, value_cache, batch.slot_mapping)
    assert torch.equal(key_cache.flatten(0, 1)[batch.slot_mapping], key)
    assert torch.equal(value_cache.flatten(0, 1)[batch.slot_mapping], value)
    assert int(key_cache.flatten(0, 1).any(-1).any(-1).sum()) == 4


@pytest.mark.parametrize("as_bytes", [False, True])
def test_fp8_caches_are_converted(as_bytes):
    generator = torch.Generator().manual_seed(3)
    batch, num_blocks = make_batch([(1, 9), (6, 2)], generator)
    query = torch.randn(7, 4, 16, generator=generator)
    caches = [
        poisoned_cache(batch, num_blocks, 2, 16, torch.float32, generator).to(torch.float8_e4m3fn)
        for _ in range(2)
    ]
    expected = paged_attention(
        query, *(cache.float() for cache in caches), batch, Scratch(), scale=0.3
    )
    if as_bytes:
        caches = [cache.view(torch.uint8) for cache in caches]
    got = paged_attention(query, *caches, batch, Scratch(), scale=0.3)
    assert torch.equal(got, expected)


def test_scratch_is_reused():
    scratch, blocks = Scratch(), torch.tensor([1, 0])
    cache = torch.randn(3, 4, 2, 8)
    first = scratch.gather("key", cache, blocks, torch.float32)
    again = scratch.gather("key", cache, blocks[:1], torch.float32)
    assert first.data_ptr() == again.data_ptr()
    assert torch.equal(again, cache[1])


@pytest.mark.parametrize(
    "extras", [{}, {"window": 3}, {"window": 5}, {"window": 30}, {"softcap": 5.0, "window": 4}]
)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_tokens_of_an_image_see_each_other(extras, with_sinks):
    """One sequence has two images. Another has an image whose first two tokens are cached. Rows
    outside of images do not change."""
    generator = torch.Generator().manual_seed(3)
    batch, num_blocks = make_batch([(1, 3), (12, 5), (4, 2)], generator)
    images = (ImageSpan(1, 2, 6, 10), ImageSpan(1, 8, 12, 16), ImageSpan(2, 13, 16, 5))
    batch = replace(batch, images=images)
    query = torch.randn(17, 4, 8, generator=generator, dtype=torch.float64)
    keys = poisoned_cache(batch, num_blocks, 2, 8, torch.float64, generator)
    values = poisoned_cache(batch, num_blocks, 2, 8, torch.float64, generator)
    sinks = torch.randn(4, generator=generator) if with_sinks else None
    options = {"scale": 0.4, "sinks": sinks, **extras}
    causal = paged_attention(query, keys, values, batch, Scratch(), **options)
    out = causal.clone()
    attend_in_images(out, query, keys, values, batch, Scratch(), **options)
    inside = {row for image in images for row in range(image.start, image.end)}
    outside = [row for row in range(17) if row not in inside]
    assert torch.equal(out[outside], causal[outside])
    for image in images:
        for row in range(image.start, image.end):
            expected = see(image, row, query, keys, values, batch, **options)
            torch.testing.assert_close(out[row], expected, rtol=1e-5, atol=1e-6)


def see(image, row, query, keys, values, batch, *, scale, sinks, window=None, softcap=None):
    """Return the attention of a row over all K and V in its window, up to the image's end."""
    position = image.context_len - (image.end - row)
    first = 0 if window is None else max(0, position - window + 1)
    table = batch.block_tables[image.sequence].tolist()
    slots = [(table[at // BLOCK_SIZE], at % BLOCK_SIZE) for at in range(first, image.context_len)]
    seen_keys, seen_values = (
        torch.stack([cache[slot] for slot in slots], 1).repeat_interleave(2, 0)
        for cache in (keys, values)
    )
    scores = (seen_keys @ query[row][:, :, None])[:, :, 0] * scale
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None].double()], 1)
    weights = scores.softmax(1)[:, : len(slots)]
    return (weights[:, None] @ seen_values)[:, 0]
