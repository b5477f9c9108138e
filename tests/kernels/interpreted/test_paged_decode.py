"""paged_decode in Triton's interpreter against its fp64 definition; see ../conftest.py."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from kernels import paged_decode as module
from kernels.paged_decode import paged_decode, scratch_numel
from kernels.reference import paged_decode_reference
from tests.kernels.paged_inputs import check_close, make_paged

SCALE = 0.1
CONTEXTS = (1, 15, 16, 17, 0, 63, 64, 65, 300)


def check(num_splits, contexts=CONTEXTS, options=None, **shape):
    """Run paged_decode with outputs and scratch filled with NaN first."""
    paged = make_paged([(1, context) for context in contexts], **shape)
    options = (options or {}) | {"scale": SCALE}
    out = torch.full_like(paged.query, float("nan"))
    scratch = torch.full((scratch_numel(*paged.query.shape, num_splits),), float("nan"))
    arguments = paged.decode_arguments
    got = paged_decode(*arguments, num_splits=num_splits, out=out, scratch=scratch, **options)
    assert got is out
    check_close(got, expected_of(paged, options))
    return paged, got


def expected_of(paged, options):
    """A row without context is padding: kernel and reference return 0."""
    return paged_decode_reference(*paged.decode_arguments, **options)


@pytest.fixture
def short_splits(monkeypatch):
    """Use splits of one key tile, so that short contexts have many."""
    configuration = module.attention_configuration

    def shortened(*shape):
        return replace(configuration(*shape), min_split_keys=1)

    monkeypatch.setattr(module, "attention_configuration", shortened)


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("num_splits", [1, 4])
def test_lengths_around_blocks_and_tiles(block_size, num_splits):
    check(num_splits, (1, block_size - 1, block_size, block_size + 1, 0, 64, 300), dtype=torch.half,
          block_size=block_size)  # fmt: skip


@pytest.mark.parametrize("num_splits", [2, 8, 64])
@pytest.mark.parametrize("options", [{}, {"window": 70}, {"sinks": torch.tensor([2.0, -9, 0, 30])}])
def test_splits_with_and_without_work(short_splits, num_splits, options):
    check(num_splits, CONTEXTS if num_splits == 2 else (1, 65, 300), options=options, heads=(4, 1))


@pytest.mark.parametrize("heads", [(2, 2), (3, 1), (6, 2), (16, 2), (7, 1), (17, 1), (71, 1)])
@pytest.mark.parametrize("num_splits", [1, 2])
def test_groups(short_splits, heads, num_splits):
    check(num_splits, (1, 70), heads=heads)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_head_dims(short_splits, head_dim, dtype):
    check(2, (1, 33, 70), head_dim=head_dim, dtype=dtype, block_size=32)


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("window", [1, 2, 16, 63, 64, 65, 1000])
def test_windows(num_splits, window):
    check(num_splits, options={"window": window}, heads=(2, 1), dtype=torch.float32)


def test_a_window_hides_what_is_before_it():
    """Blocks entirely before the window may be freed or belong to other sequences."""
    paged = make_paged([(1, 200)], dtype=torch.float32)
    options = {"scale": SCALE, "window": 40}
    expected = expected_of(paged, options)
    for block in paged.block_tables[0, : (200 - 40) // 16]:
        paged.key_cache[block] = paged.value_cache[block] = float("nan")
    got = paged_decode(*paged.decode_arguments, num_splits=1, **options)
    check_close(got, expected)


@pytest.mark.parametrize("num_splits", [1, 4])
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
def test_softcap_and_sinks(short_splits, num_splits, options):
    check(num_splits, options=options, dtype=torch.float32)


@pytest.mark.parametrize("cache_dtype", [torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp8_caches(short_splits, dtype, cache_dtype):
    scales = {"key_scale": 0.37, "value_scale": 2.5}
    for num_splits in (1, 2):
        check(num_splits, (1, 17, 90), options=scales, dtype=dtype, cache_dtype=cache_dtype)


@pytest.mark.parametrize("layout", ["HND", "pair"])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_layouts(layout, ids):
    check(1, (1, 40), layout=layout, ids=ids, heads=(6, 3))


@pytest.mark.parametrize("num_splits", [1, 4])
def test_large_scores_do_not_overflow(short_splits, num_splits):
    check(num_splits, (1, 100, 300), spread=12.0, dtype=torch.float16)


def test_queries_inside_a_merged_projection():
    paged = make_paged([(1, 20), (1, 50)])
    fused = torch.cat([paged.query, torch.full_like(paged.query, float("nan"))], 1)
    query = fused[:, : paged.query.shape[1]]
    assert not query.is_contiguous()
    got = paged_decode(query, *paged.decode_arguments[1:], scale=SCALE, num_splits=1)
    check_close(got, expected_of(paged, {"scale": SCALE}))


def test_nothing_is_allocated_if_out_and_scratch_are_given(monkeypatch):
    refused = partial(pytest.fail, "allocates")
    paged = make_paged([(1, 20)])
    out, scratch = torch.empty_like(paged.query), torch.empty(4096)
    with monkeypatch.context() as patched:
        for name in ("empty", "empty_like", "zeros", "full"):
            patched.setattr(torch, name, refused)
        paged_decode(*paged.decode_arguments, scale=SCALE, num_splits=2, out=out, scratch=scratch)
    check_close(out, expected_of(paged, {"scale": SCALE}))
