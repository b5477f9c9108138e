"""Attention in segments, in Triton's interpreter: a token has the same bits in any batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.attention.paged_prefill import paged_prefill
from kernels.attention.prefill_splits import segment_work
from kernels.attention.split_results import scratch_numel
from tests.kernels.paged_inputs import check_close, make_paged
from tests.kernels.reference import paged_prefill_reference

SEGMENT = 64
"""Keys in a segment. On a GPU there are more: the interpreter would take minutes."""
LENGTHS = [(140, 140), (70, 70), (1, 1)]
"""New tokens and context length. The first sequence has three segments."""
CHUNKS = [(0, 0, 17), (0, 17, 97), (0, 139, 140), (0, 63, 65), (1, 69, 70), (2, 0, 1)]
"""Sequence, first token and end of what is computed alone: chunks after a cached prefix, decodes,
and both sides of a segment's end."""
MIXED = [(0, 130, 131), (1, 3, 44), (0, 100, 107), (2, 0, 1)]
"""The chunks of one batch."""
OPTIONS = [
    {},
    {"window": 33},
    {"window": 100, "softcap": 30.0},
    {"sinks": torch.tensor([-1.0, 5.0])},
    {"window": 130, "softcap": 3.0, "sinks": torch.tensor([1.0, 3.0])},
]


def attend(paged, options, num_splits=0):
    """Return the attention of all tokens. Outputs and scratch are NaN before."""
    arguments = (paged.query, paged.key_cache, paged.query_starts, paged.context_lens, num_splits)
    work = segment_work(*arguments, window=options.get("window"), segment_keys=SEGMENT)
    scratch = torch.full((scratch_numel(work.num_slots, *paged.query.shape[1:]),), float("nan"))
    given = {"work": work, "scratch": scratch, "out": torch.full_like(paged.query, float("nan"))}
    out = paged_prefill(*paged.prefill_arguments, scale=0.1, **given, **options)
    return out, (work.items[:num_splits, 0] >= 0).sum()


def chunk(paged, row, start, end):
    """Return the tokens from `start` to `end` of sequence `row`, after those before them."""
    first = int(paged.query_starts[row])
    return replace(
        paged,
        query=paged.query[first + start : first + end],
        block_tables=paged.block_tables[row : row + 1],
        query_starts=torch.tensor([0, end - start], dtype=torch.int32),
        context_lens=torch.tensor([end], dtype=torch.int32),
    )


def joined(paged, chunks):
    """Return a batch of one chunk from each of several sequences: (row, start, end)."""
    parts = [chunk(paged, *each) for each in chunks]
    sizes = [0, *(len(part.query) for part in parts)]
    return replace(
        paged,
        query=torch.cat([part.query for part in parts]),
        block_tables=torch.cat([part.block_tables for part in parts]),
        query_starts=torch.tensor(sizes).cumsum(0).int(),
        context_lens=torch.cat([part.context_lens for part in parts]),
    )


def check(options, *, heads=(2, 1), **shape):
    """Compare whole prompts in one batch with chunks that are alone, and with a mixed batch."""
    paged = make_paged(LENGTHS, heads=heads, **shape)
    expected, _ = attend(paged, options)
    for row, start, end in CHUNKS:
        got, num_used = attend(chunk(paged, row, start, end), options, num_splits=20)
        assert torch.equal(got, chunk(replace(paged, query=expected), row, start, end).query)
        assert num_used > 1 or end <= 2 * SEGMENT or "window" in options, "it is split"
    wanted = [chunk(replace(paged, query=expected), *each).query for each in MIXED]
    for num_splits in (0, 5):
        got, num_used = attend(joined(paged, MIXED), options, num_splits)
        assert torch.equal(got, torch.cat(wanted)), num_splits
        assert num_used == num_splits or "window" in options


@pytest.mark.matrix(cases=1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options))
def test_windows_softcap_and_sinks(options, dtype):
    check(options, dtype=dtype)


@pytest.mark.matrix(cases=1)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_head_dims(head_dim):
    check({}, head_dim=head_dim)


@pytest.mark.matrix(cases=1)
@pytest.mark.parametrize("heads", [(2, 2), (7, 1), (71, 1)])
def test_groups(heads):
    """71 heads are more than a tile has rows."""
    check({"window": 100}, heads=heads)


@pytest.mark.matrix(cases=1)
@pytest.mark.parametrize("cache_dtype", [torch.uint8, torch.float8_e4m3fn])
def test_fp8_caches(cache_dtype):
    check({"value_scale": 2.5}, cache_dtype=cache_dtype)


@pytest.mark.matrix(cases=2)
@pytest.mark.parametrize("num_splits", [0, 20])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options))
def test_the_result_is_attention(options, num_splits):
    paged = make_paged([(9, 140), (1, 64), (1, 66), (0, 20), (17, 17)], heads=(2, 1))
    got, _ = attend(paged, options, num_splits)
    expected = paged_prefill_reference(*paged.prefill_arguments, scale=0.1, **options)
    check_close(got, expected)


@pytest.mark.parametrize("num_splits", [0, 20])
def test_padding(num_splits):
    """A padding decode gets zeros, and rows past the last sequence are not written."""
    paged = make_paged([(1, 0), (3, 140), (1, 0)])
    query = torch.cat([paged.query, torch.full_like(paged.query, float("nan"))])
    got, _ = attend(replace(paged, query=query), {}, num_splits)
    assert (got[[0, 4]] == 0).all()
    assert got[1:4].isfinite().all()
    assert got[5:].isnan().all()


def test_the_longest_blocks_are_split():
    """With less room than segments, a block of many segments gets it."""
    paged = make_paged([(1, 140), (1, 300), (1, 100)], heads=(2, 1))
    for num_splits, rows in ((20, [0, 1, 2]), (10, [0, 1, 2]), (9, [1]), (5, [1]), (4, [])):
        arguments = (paged.query, paged.key_cache, paged.query_starts, paged.context_lens)
        work = segment_work(*arguments, num_splits, segment_keys=SEGMENT)
        assert sorted({*work.items[:num_splits, 0].tolist()} - {-1}) == rows
        assert sorted(work.rows[work.rows[:, 2] > 0, 0].tolist()) == rows
