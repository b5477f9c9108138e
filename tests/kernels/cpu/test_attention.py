"""The C++ attention against its fp64 definition, with NaN where it must not read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from kernels.attention.batch import PagedBatch
from kernels.cpu.attention import attention, paged_attention
from kernels.cpu.calls import run
from tests.kernels.paged_inputs import check_close, make_paged
from tests.kernels.reference import paged_attention_reference

EDGES = [(1, 1), (1, 15), (1, 16), (1, 17), (1, 63), (1, 64), (1, 65), (1, 0)]
CHUNKS = [(1, 1), (5, 5), (2, 34), (40, 40), (33, 70), (16, 16), (3, 129)]
"""EDGES are decodes, CHUNKS are chunks of prompts: (query tokens, context length) of each."""
EXTRAS = [
    {},
    {"window": 3},
    {"window": 50},
    {"window": 64, "softcap": 5.0},
    {"sinks": True},
    {"sinks": True, "window": 17, "softcap": 2.0},
]


def attend(paged, num_decodes, **options):
    """Return the results of the kernel and of the definition.

    num_decodes: how many sequences decode. They come first.
    """
    starts = paged.query_starts[num_decodes:] - num_decodes
    lens, tables, slots = paged.context_lens, paged.block_tables, paged.context_lens[:0]
    ends = paged.query_starts.tolist()
    spans = tuple(zip(ends, ends[1:], lens.tolist(), strict=False))
    batch = PagedBatch(starts, lens, tables, slots, None, num_decodes)
    tensors = paged.query, paged.key_cache, paged.value_cache
    got = paged_attention(*tensors, batch, **options)
    # A decode with a context of 0 is padding. Without a query, its expected result is 0.
    known = tuple((first, end if context else first, context) for first, end, context in spans)
    expected = paged_attention_reference(
        *tensors, PagedBatch(starts, lens, tables, slots, known, num_decodes), **options
    )
    return got, expected


@pytest.fixture
def make_sinks():
    return lambda num_heads: torch.randn(num_heads, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("extras", EXTRAS)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (40, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decodes_and_chunks_against_the_definition(dtype, heads, extras, make_sinks):
    options = {**extras, "scale": 0.3}
    if "sinks" in options:
        options["sinks"] = make_sinks(heads[0])
    paged = make_paged(EDGES + CHUNKS, heads=heads, head_dim=32, dtype=dtype)
    check_close(*attend(paged, len(EDGES), **options))


@pytest.mark.parametrize("head_dim", [16, 48, 64, 80, 96, 128, 192, 256, 576])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_dims_block_sizes_and_layouts(dtype, head_dim):
    for block_size, layout in ((16, "NHD"), (5, "HND"), (32, "pair")):
        paged = make_paged(
            [(1, 9), (1, 70), (20, 33)],
            heads=(4, 2),
            head_dim=head_dim,
            dtype=dtype,
            block_size=block_size,
            layout=layout,
        )
        check_close(*attend(paged, 2, scale=head_dim**-0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_of_any_size_on_every_target(target, dtype):
    """A KV head's matrix products have a row for each query head of its group. If there are few
    rows, keys and values are read from the cache without packing them, for up to 4 rows at a time.
    The target decides how many rows are few (FEW_ROWS)."""
    for group in (1, 2, 3, 4, 5, 7, 12, 13):
        paged = make_paged([(1, 33), (1, 81), (2, 50)], heads=(group, 1), head_dim=80, dtype=dtype)
        for window in (None, 37):
            check_close(*attend(paged, 2, scale=0.2, window=window))


def test_a_batch_without_new_tokens():
    paged = make_paged([(0, 40), (0, 0)], dtype=torch.float32)
    got, _ = attend(paged, 0, scale=0.1)
    assert got.shape == (0, 4, 64)


@pytest.mark.parametrize("extras", [{}, {"sinks": True}, {"window": 700, "softcap": 3.0}])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_long_context_is_split(extras, num_threads, make_sinks):
    """If there are few work items, the keys of long decodes and chunks are split."""
    options = {**extras, "scale": 0.2}
    if "sinks" in options:
        options["sinks"] = make_sinks(2)
    paged = make_paged([(1, 1200), (1, 3), (3, 900)], heads=(2, 1), dtype=torch.float32)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        check_close(*attend(paged, 2, **options))
    finally:
        torch.set_num_threads(before)


def test_results_do_not_depend_on_the_number_of_threads():
    paged = make_paged([*[(1, 40 + row) for row in range(30)], (60, 90)], dtype=torch.float32)
    before, results = torch.get_num_threads(), []
    try:
        for num_threads in (1, 4):
            torch.set_num_threads(num_threads)
            results.append(attend(paged, 30, scale=0.2)[0])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


def test_scores_of_any_size():
    paged = make_paged([(1, 100), (9, 60)], dtype=torch.float32, spread=30.0)
    check_close(*attend(paged, 1, scale=1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_that_are_a_part_of_their_keys(dtype):
    """Latent attention: all heads share one row, whose first dims are V."""
    paged = make_paged([(1, 40), (1, 600), (7, 20)], heads=(20, 1), head_dim=576, dtype=dtype)
    paged = replace(paged, value_cache=paged.key_cache[..., :512])
    check_close(*attend(paged, 2, scale=0.05))


def test_keys_and_values_of_different_dims():
    paged = make_paged([(1, 40), (7, 20)], head_dim=48, dtype=torch.float32)
    paged = replace(paged, value_cache=paged.value_cache[..., :16])
    got, expected = attend(paged, 1, scale=0.1)
    assert got.shape[-1] == 16
    check_close(got, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": torch.zeros(8, 3, 48)}, "shapes do not match"),
        ({"query": torch.zeros(8, 4, 64)}, "shapes do not match"),
        ({"query": torch.zeros(8, 4, 48, dtype=torch.float16)}, "all must be fp32, or all bf16"),
        ({"query": torch.zeros(8, 4, 48, dtype=torch.bfloat16)}, "all must be fp32, or all bf16"),
        ({"query": torch.zeros(48, 4, 8).permute(2, 1, 0)}, "must be contiguous"),
        ({"block_tables": torch.zeros(2, 9, dtype=torch.int64)}, "must be dense int32"),
    ],
)
def test_invalid_shapes_are_rejected(changes, message):
    paged = make_paged([(1, 40), (7, 20)], head_dim=48, dtype=torch.float32)
    with pytest.raises(ValueError, match=message):
        attend(replace(paged, **changes), 1, scale=0.1)


@pytest.mark.parametrize(("window", "after"), [(None, 2**40), (None, 3), (70, 69), (4, 300)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_behind_a_query(dtype, window, after):
    """Whole texts of up to three segments, whose keys lie in blocks of one token."""
    lengths = (1, 65, 700, 30)
    torch.manual_seed(2)
    query, key, value = torch.randn(3, sum(lengths), 2, 32).to(dtype)
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    tables = starts[:-1, None] + torch.arange(700, dtype=torch.int32)
    lens = torch.tensor(lengths, dtype=torch.int32)
    batch = PagedBatch(starts, lens, tables, starts[:0], None)
    out = torch.full_like(query, torch.nan)
    kernel = attention(
        query, key[:, None], value[:, None], out, scale=0.2, window=window, after=after
    )
    kernel.arguments.set_batch(batch)
    run(kernel)
    for start, length in zip(starts.tolist(), lengths, strict=False):
        places = torch.arange(length)
        distance = places[:, None] - places
        is_seen = (distance > -1 - after) & (distance < (window or length))
        alone = [
            rows[start : start + length].transpose(0, 1).double() for rows in (query, key, value)
        ]
        expected = F.scaled_dot_product_attention(*alone, attn_mask=is_seen, scale=0.2)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        got = out[start : start + length].transpose(0, 1).double()
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=0)
