"""paged_decode in Triton's interpreter against its fp64 definition; see ../conftest.py."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from kernels.attention.paged_decode import paged_decode
from kernels.attention.split_results import scratch_numel
from kernels.attention.work_list import UNIT, make_work_list
from tests.kernels.paged_inputs import check_close, make_paged
from tests.kernels.reference import paged_decode_reference

SCALE = 0.1
CONTEXTS = (1, 15, 16, 17, 0, 63, 64, 65, 300, 700)


def check(num_wanted, contexts=CONTEXTS, options=None, **shape):
    """Fill outputs and scratch with NaN, run paged_decode and check its result.

    num_wanted: the number of splits of all sequences together, as short as UNIT if need be. If 0,
    contexts stay whole.
    """
    paged = make_paged([(1, context) for context in contexts], **shape)
    options = (options or {}) | {"scale": SCALE}
    work = splits(paged, num_wanted, options.get("window"))
    out = paged.blank_output()
    num_slots = 0 if work is None else len(work.items)
    scratch = torch.full((scratch_numel(num_slots, *out.shape[1:]),), float("nan"))
    arguments = paged.decode_arguments
    got = paged_decode(*arguments, work=work, out=out, scratch=scratch, **options)
    assert got is out
    check_close(got, expected_of(paged, options))
    return paged, got


def splits(paged, num_wanted, window=None):
    if num_wanted == 0:
        return None
    return make_work_list(paged.context_lens, num_wanted, window=window, min_split_keys=UNIT)


def expected_of(paged, options):
    """Return the reference's result. A row without context is padding, and its result is 0."""
    return paged_decode_reference(*paged.decode_arguments, **options)


@pytest.mark.matrix
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("num_wanted", [0, 9])
def test_lengths_around_blocks_and_tiles(block_size, num_wanted):
    check(num_wanted, (1, block_size - 1, block_size, block_size + 1, 0, 64, 300), dtype=torch.half,
          block_size=block_size)  # fmt: skip


@pytest.mark.matrix
@pytest.mark.parametrize("num_wanted", [1, 8, 64])
@pytest.mark.parametrize(
    "options", [{}, {"window": 170}, {"sinks": torch.tensor([2.0, -9, 0, 30])}]
)
def test_whole_and_split_contexts_of_one_batch(num_wanted, options):
    check(num_wanted, options=options, heads=(4, 1))


@pytest.mark.matrix
@pytest.mark.parametrize("heads", [(2, 2), (3, 1), (6, 2), (16, 2), (7, 1), (17, 1), (71, 1)])
@pytest.mark.parametrize("num_wanted", [0, 9])
def test_groups(heads, num_wanted):
    check(num_wanted, (1, 170), heads=heads)


@pytest.mark.matrix
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_head_dims(head_dim, dtype):
    check(9, (1, 33, 170), head_dim=head_dim, dtype=dtype, block_size=32)


@pytest.mark.matrix(cases=1)
@pytest.mark.parametrize(
    ("dims", "heads", "dtype", "cache_dtype"),
    [
        ((320, 256), 3, torch.bfloat16, None),
        ((576, 512), 16, torch.bfloat16, None),
        ((576, 512), 71, torch.float16, None),
        ((576, 512), 5, torch.float32, None),
        ((320, 256), 17, torch.bfloat16, torch.uint8),
        ((576, 512), 4, torch.float16, torch.float8_e4m3fn),
    ],
)
def test_latents(dims, heads, dtype, cache_dtype):
    """V lies in K's rows, and all heads share them."""
    shape = {"head_dim": dims[0], "value_dim": dims[1], "heads": (heads, 1), "dtype": dtype}
    scales = {} if cache_dtype is None else {"key_scale": 0.37, "value_scale": 0.37}
    for num_wanted, options in ((9, scales), (0, scales | {"window": 20, "softcap": 5.0})):
        check(num_wanted, (1, 33, 0, 170), options, cache_dtype=cache_dtype, **shape)


@pytest.mark.matrix
@pytest.mark.parametrize("num_wanted", [0, 20])
@pytest.mark.parametrize("window", [1, 2, 16, 64, 127, 128, 129, 300, 1000])
def test_windows(num_wanted, window):
    check(num_wanted, options={"window": window}, heads=(2, 1), dtype=torch.float32)


@pytest.mark.parametrize("num_wanted", [0, 9])
def test_a_window_hides_what_is_before_it(num_wanted):
    """Blocks entirely before the window may be freed or belong to other sequences."""
    paged = make_paged([(1, 500)], dtype=torch.float32)
    options = {"scale": SCALE, "window": 240}
    expected = expected_of(paged, options)
    for block in paged.block_tables[0, : (500 - 240) // 16]:
        paged.key_cache[block] = paged.value_cache[block] = float("nan")
    work = splits(paged, num_wanted, options["window"])
    got = paged_decode(*paged.decode_arguments, work=work, **options)
    check_close(got, expected)


@pytest.mark.matrix
@pytest.mark.parametrize("num_wanted", [0, 20])
@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 0.5},
        {"softcap": 30.0, "window": 20},
        {"sinks": torch.tensor([-40.0, 0.0, 5.0, 40.0])},
        {"softcap": 3.0, "window": 233, "sinks": torch.tensor([1.0, 2.0, 3.0, 4.0])},
    ],
    ids=lambda options: "+".join(options),
)
def test_softcap_and_sinks(num_wanted, options):
    check(num_wanted, options=options, dtype=torch.float32)


@pytest.mark.matrix
@pytest.mark.parametrize("cache_dtype", [torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp8_caches(dtype, cache_dtype):
    scales = {"key_scale": 0.37, "value_scale": 2.5}
    for num_wanted in (0, 9):
        check(num_wanted, (1, 17, 190), options=scales, dtype=dtype, cache_dtype=cache_dtype)


@pytest.mark.matrix
@pytest.mark.parametrize("cache_dtype", [torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_fp8_caches_take_queries_of_any_size(cache_dtype, size):
    """Products with fp8 caches are computed in fp16, whose largest number is 65504."""
    paged = make_paged([(1, 70), (1, 9)], cache_dtype=cache_dtype)
    query = paged.query.float() * size
    query[0, 1] = 0
    arguments = (query.bfloat16(), *paged.decode_arguments[1:])
    got = paged_decode(*arguments, scale=SCALE / size)
    check_close(got, paged_decode_reference(*arguments, scale=SCALE / size))


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["HND", "pair"])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_layouts(layout, ids):
    check(0, (1, 40), layout=layout, ids=ids, heads=(6, 3))


@pytest.mark.parametrize("num_wanted", [0, 9])
def test_large_scores_do_not_overflow(num_wanted):
    check(num_wanted, (1, 100, 300), spread=12.0, dtype=torch.float16)


def test_queries_inside_a_merged_projection():
    paged = make_paged([(1, 20), (1, 50)])
    fused = torch.cat([paged.query, torch.full_like(paged.query, float("nan"))], 1)
    query = fused[:, : paged.query.shape[1]]
    assert not query.is_contiguous()
    got = paged_decode(query, *paged.decode_arguments[1:], scale=SCALE)
    check_close(got, expected_of(paged, {"scale": SCALE}))


@pytest.mark.parametrize("num_wanted", [0, 2])
def test_nothing_is_allocated_that_is_given(num_wanted, monkeypatch):
    """Whole contexts need no scratch."""
    paged = make_paged([(1, 320)])
    out = torch.full_like(paged.query, float("nan"))
    options = {"work": make_work_list(paged.context_lens, num_wanted, min_split_keys=UNIT)}
    if num_wanted:
        options["scratch"] = torch.empty(4096)
    paged_decode(*paged.decode_arguments, scale=SCALE, **options)
    refused = partial(pytest.fail, "allocates")
    with monkeypatch.context() as patched:
        for name in ("empty", "empty_like", "zeros", "full"):
            patched.setattr(torch, name, refused)
        paged_decode(*paged.decode_arguments, scale=SCALE, out=out, **options)
    check_close(out, expected_of(paged, {"scale": SCALE}))
