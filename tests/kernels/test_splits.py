"""How many splits decodes and prefills get, and the scratch that they may need."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import dry_run
from kernels.attention import paged_decode, prefill_splits, work_list
from kernels.attention.work_list import MIN_SPLIT_KEYS, WAVES

counts = st.integers(1, 512)
lengths = st.integers(1, 2**17)


@given(counts, counts, lengths)
def test_decodes_fill_the_gpu_and_never_need_more_items_than_promised(rows, programs, longest):
    wanted = work_list.wanted_splits(rows, programs, longest)
    assert wanted == 0 or wanted + rows <= work_list.max_items(rows, programs, longest)
    possible = rows * (longest // MIN_SPLIT_KEYS)
    assert wanted <= WAVES * programs
    if wanted:
        assert wanted >= min(programs, possible)
    else:
        assert longest < 2 * MIN_SPLIT_KEYS or rows >= 0.9 * programs


@pytest.mark.parametrize(
    ("num_rows", "longest", "expected"),
    [
        (1, 300, 0),  # too short to split
        (1, 4096, 16),  # 256 keys each
        (1, 131072, 49),  # 396 programs run at once, 8 for each split
        (16, 131072, 49),
        (40, 2048, 196),  # whole contexts would leave some processors idle
        (48, 2048, 0),  # 98 % full, and no context is long
        (48, 4096, 196),
        (64, 2048, 0),
        (64, 131072, 196),  # four times 49
        (256, 131072, 196),
    ],
)
def test_decodes_on_an_h200_with_8_kv_heads(num_rows, longest, expected):
    with dry_run.target(90):
        query, cache = tensors(num_rows)
        assert paged_decode.wanted_splits(query, cache, 132, longest) == expected


def test_a_window_bounds_the_contexts():
    with dry_run.target(90):
        query, cache = tensors(1)
        assert paged_decode.wanted_splits(query, cache, 132, 131072, window=4096) == 16
        assert paged_decode.wanted_splits(query, cache, 132, 131072, window=256) == 0
        chunk = [(20, 30020)]
        for lengths in (chunk, None):
            assert prefill_splits.wanted_splits(query, cache, lengths, 132, 131072, 2000) == 132
            assert prefill_splits.wanted_splits(query, cache, lengths, 132, 131072, 900) == 0


@pytest.mark.parametrize(
    ("batch", "is_split"),
    [
        ([(20, 30020)], True),  # 8 programs would run where 264 can
        ([(20, 700)], False),
        ([(20, 30020), (500, 500)], True),
        ([(20, 131092), (2048, 2048)], True),
        ([(20, 131092), *[(500, 500)] * 60], True),
        ([(4096, 4096)], True),  # 1,024 programs; the longest would run long after most have ended
        ([(4096, 4096)] * 2, False),
        ([(1024, 9216)], False),  # 256 programs of 264
        ([(1088, 9280)], True),  # 272 programs would leave 256 idle for half of the time
        ([(512, 1024)] * 8, False),
        ([(500, 500)] * 9, False),
        ([(0, 30000), (20, 20)], False),
        ([], False),
    ],
)
def test_prefills_on_an_h200_with_8_kv_heads(batch, is_split):
    """There is room for no splits, or for four times as many as run at once: 132 splits of 8 heads
    are 1,056 programs, and two run at once on each of 132 processors."""
    with dry_run.target(90):
        query, cache = tensors(sum(new for new, _ in batch))
        wanted = prefill_splits.wanted_splits(query, cache, batch, 132, 131092)
    assert wanted == 132 * is_split


def test_a_graph_has_room_for_splits_unless_contexts_are_short():
    with dry_run.target(90):
        query, cache = tensors(64)
        for longest, expected in ((131072, 132), (1024, 132), (1023, 0)):
            assert prefill_splits.wanted_splits(query, cache, None, 132, longest) == expected
        query, cache = tensors(64, 1024, 1024)
        wanted = prefill_splits.wanted_splits(query, cache, None, 132, 131072)
        assert wanted == 0, "one block with 1,024 KV heads fills the GPU"


sequences = st.tuples(st.integers(0, 3000), st.integers(0, 100_000))


@given(st.lists(sequences, max_size=9), st.sampled_from([(4, 1), (14, 2), (32, 8), (130, 1)]))
def test_prefills_never_need_more_scratch_than_promised(batch, heads):
    batch = [(new, new + cached) for new, cached in batch]
    num_tokens = sum(new for new, _ in batch)
    with dry_run.target(90):
        query, cache = tensors(num_tokens, *heads)
        splits = prefill_splits.wanted_splits(query, cache, batch, 132, 2**17)
        work = make_work(query, cache, len(batch), splits)
        assert work.num_slots <= prefill_splits.max_slots(query, cache, 132, 2**17)


def make_work(query, cache, num_sequences, num_splits):
    starts = torch.zeros(num_sequences + 1, dtype=torch.int32)
    with patch("kernels.attention.prefill_work.prefill_work_kernel"):
        return prefill_splits.prefill_work(query, cache, starts, starts[1:], num_splits)


def tensors(num_tokens, num_heads=32, num_kv_heads=8):
    query = torch.empty(num_tokens, num_heads, 128, dtype=torch.bfloat16)
    return query, torch.empty(0, 16, num_kv_heads, 128, dtype=torch.bfloat16)
