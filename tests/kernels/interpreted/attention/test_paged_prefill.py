"""paged_prefill in Triton's interpreter against its fp64 definition; see ../conftest.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.attention.paged_decode import paged_decode
from kernels.attention.paged_prefill import paged_prefill
from kernels.attention.prefill_splits import prefill_work
from kernels.attention.split_results import scratch_numel
from tests.kernels.paged_inputs import check_close, make_paged
from tests.kernels.reference import paged_prefill_reference

SCALE = 0.1
MIXED = [(1, 1), (15, 15), (16, 17), (0, 0), (0, 30), (33, 53), (1, 131), (64, 128), (5, 95)]
"""Whole prompts, chunks after a prefix, decode rows, sequences without tokens."""
SHORT = [(1, 40), (21, 21), (5, 70)]


LONG = [(20, 400), (3, 3), (1, 330), (0, 90), (40, 201)]
"""A few tokens each, after long and short cached prefixes."""


def check(lengths, options=None, *, num_splits=0, **shape):
    """Fill outputs and scratch with NaN, run paged_prefill and check its result.

    num_splits: the maximum number of splits. Unless it is 0, something must be split. Splits may be
    as short as a tile.
    """
    paged = make_paged(lengths, **shape)
    options = (options or {}) | {"scale": SCALE}
    work = make_work(paged, num_splits, options.get("window"))
    assert (work.items[:num_splits, 0] >= 0).any() == (num_splits > 0)
    out = paged.blank_output()
    numel = scratch_numel(work.num_slots, *out.shape[1:])
    scratch = torch.full((numel,), float("nan"))
    given = {"work": work, "scratch": scratch, "out": out}
    assert paged_prefill(*paged.prefill_arguments, **given, **options) is out
    check_close(out, paged_prefill_reference(*paged.prefill_arguments, **options))


def make_work(paged, num_splits, window=None):
    arguments = (paged.query, paged.key_cache, paged.query_starts, paged.context_lens, num_splits)
    return prefill_work(*arguments, window=window, min_split_keys=1)


@pytest.mark.matrix
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_mixed_batch(block_size, dtype):
    check(MIXED, block_size=block_size, dtype=dtype)


@pytest.mark.matrix(cases=1)
@pytest.mark.parametrize(("num_splits", "block_size"), [(12, 16), (17, 64), (60, 32)])
def test_splits_of_a_mixed_batch(block_size, num_splits):
    """If there may be 60 splits, they are as short as possible."""
    check(MIXED, num_splits=num_splits, block_size=block_size, dtype=torch.half, heads=(2, 1))
    check(LONG, num_splits=num_splits, block_size=block_size, heads=(2, 1))


@pytest.mark.matrix(cases=2)
@pytest.mark.parametrize(
    "options",
    [
        {"window": 33},
        {"window": 200},
        {"softcap": 30.0, "window": 64},
        {"sinks": torch.tensor([-40.0, 0.0, 5.0, 40.0])},
        {"softcap": 3.0, "window": 233, "sinks": torch.tensor([1.0, 2.0, 3.0, 4.0])},
    ],
    ids=lambda options: "+".join(options),
)
def test_splits_with_windows_softcap_and_sinks(options):
    check(LONG, options, num_splits=30, dtype=torch.half, heads=(4, 1))


@pytest.mark.matrix
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_splits_of_every_head_dim(head_dim, dtype):
    check([(5, 170), (9, 9)], num_splits=9, head_dim=head_dim, dtype=dtype)


@pytest.mark.matrix(cases=1)
@pytest.mark.parametrize(
    ("dims", "heads", "dtype", "cache_dtype"),
    [
        ((320, 256), 5, torch.bfloat16, None),
        ((576, 512), 34, torch.bfloat16, None),
        ((576, 512), 16, torch.float32, None),
        ((576, 512), 3, torch.bfloat16, torch.uint8),
    ],
)
def test_latents(dims, heads, dtype, cache_dtype):
    """V lies in K's rows, and all heads share them."""
    shape = {"head_dim": dims[0], "value_dim": dims[1], "heads": (heads, 1), "dtype": dtype}
    check([(2, 170), (9, 9), (1, 40)], num_splits=9, cache_dtype=cache_dtype, **shape)
    check([(5, 21), (3, 3)], {"window": 7}, cache_dtype=cache_dtype, **shape)


@pytest.mark.matrix(cases=1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_expanded_latents(dtype):
    """V has fewer dims than K, and lies apart. Sequences with tokens but a context of 0 are those
    that are not expanded."""
    shape = {"head_dim": 192, "value_dim": 128, "heads": (3, 3), "dtype": dtype}
    check([(2, 170), (3, 0), (9, 9), (1, 0)], num_splits=9, **shape)
    check([(1, 0), (70, 70), (5, 21)], {"window": 30}, **shape)


@pytest.mark.matrix(cases=1)
@pytest.mark.parametrize("heads", [(2, 2), (7, 1), (130, 1)])
def test_splits_of_groups(heads):
    check([(1, 20), (2, 270)], num_splits=8, heads=heads)


def test_one_long_prefix_among_many_short_prompts():
    """The long prefix and two shorter ones are split. The prompts around them are not."""
    short = [(new, new) for new in (3, 17, 1, 40, 16)]
    check([*short, (20, 700), *short, (2, 310), *short, (0, 90), (20, 333)], num_splits=24)


@pytest.mark.matrix
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("cached", [0, 1, 16, 64])
def test_lengths_around_blocks_and_tiles(block_size, cached):
    news = (1, block_size - 1, block_size, block_size + 1)
    check([(new, new + cached) for new in news], block_size=block_size, heads=(2, 1))


@pytest.mark.matrix(cases=3)
@pytest.mark.parametrize("heads", [(2, 2), (3, 1), (6, 2), (16, 2), (7, 1), (71, 1), (130, 1)])
def test_groups(heads):
    """130 query heads per KV head are more than a tile has rows."""
    check(SHORT, heads=heads)


@pytest.mark.matrix
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_head_dims(head_dim, dtype):
    check(SHORT, head_dim=head_dim, dtype=dtype, block_size=32)


@pytest.mark.matrix(cases=3)
@pytest.mark.parametrize("window", [1, 2, 16, 31, 33, 64, 1000])
def test_windows(window):
    """With 64 query rows and a window of 1, some rows see no key of some tiles."""
    check([(1, 131), (64, 128), (70, 70)], {"window": window}, heads=(2, 1))


@pytest.mark.matrix(cases=2)
@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 0.5},
        {"softcap": 30.0, "window": 20},
        {"sinks": torch.tensor([-40.0, 0.0, 5.0, 40.0])},
        {"softcap": 3.0, "window": 33, "sinks": torch.tensor([1.0, 2.0, 3.0, 4.0])},
    ],
    ids=lambda options: "+".join(options),
)
def test_softcap_and_sinks(options):
    check(MIXED, options, dtype=torch.float16)


@pytest.mark.matrix
@pytest.mark.parametrize("cache_dtype", [torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp8_caches(dtype, cache_dtype):
    """With head dim 256, the kernel has one loop with masks for all tiles, instead of two loops."""
    options = {"key_scale": 0.37, "value_scale": 2.5}
    types = {"dtype": dtype, "cache_dtype": cache_dtype}
    for num_splits in (0, 8):
        check([*SHORT, (1, 200)], options, num_splits=num_splits, **types)
        check([(5, 170)], options, num_splits=num_splits, head_dim=256, heads=(2, 1), **types)


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["HND", "pair"])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_layouts(layout, ids):
    check(SHORT, layout=layout, ids=ids, heads=(6, 3))


def test_large_scores_do_not_overflow():
    check(SHORT, spread=12.0, dtype=torch.float16)


def test_many_sequences_most_of_them_idle():
    idle = [(0, 7)] * 60
    check([*idle, *SHORT, *idle, *idle, *SHORT], heads=(1, 1))


@pytest.mark.parametrize("num_splits", [0, 9])
def test_rows_past_the_last_sequence_are_not_written(num_splits):
    paged = make_paged([*SHORT, (3, 200)])
    query = torch.cat([paged.query, torch.full_like(paged.query, float("nan"))])
    out = torch.full_like(query, 7.0)
    work = make_work(replace(paged, query=query), num_splits)
    paged_prefill(query, *paged.prefill_arguments[1:], out=out, work=work, scale=SCALE)
    expected = paged_prefill_reference(*paged.prefill_arguments, scale=SCALE)
    check_close(out[: len(expected)], expected)
    assert (out[len(expected) :] == 7.0).all()


@pytest.mark.parametrize("options", [{}, {"window": 30, "softcap": 3.0}])
def test_decode_rows_equal_those_of_paged_decode(options):
    paged = make_paged([(1, 40), (1, 1), (1, 100)], dtype=torch.float32)
    got = paged_prefill(*paged.prefill_arguments, scale=SCALE, **options)
    expected = paged_decode(*paged.decode_arguments, scale=SCALE, **options)
    check_close(got, expected.double())


@pytest.mark.parametrize("num_splits", [0, 9])
def test_blocks_before_the_window_are_not_read(num_splits):
    paged = make_paged([(5, 200)], heads=(8, 2))
    options = {"scale": SCALE, "window": 40}
    expected = paged_prefill_reference(*paged.prefill_arguments, **options)
    for block in paged.block_tables[0, : (195 - 40) // 16]:
        paged.key_cache[block] = paged.value_cache[block] = float("nan")
    work = make_work(paged, num_splits, 40)
    assert (work.items[:num_splits, 0] >= 0).any() == (num_splits > 0)
    check_close(paged_prefill(*paged.prefill_arguments, work=work, **options), expected)
