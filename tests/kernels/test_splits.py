"""How many splits decodes and prefills get, and the scratch that they may need."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import dry_run, paged_decode, paged_prefill, work_list
from kernels.work_list import MIN_SPLIT_KEYS, WAVES

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
        (1, 4096, 16),
        (1, 131072, 49),  # once 396 programs, 8 for each split
        (16, 131072, 49),
        (40, 2048, 196),  # whole contexts would leave some processors idle
        (48, 2048, 0),  # 98 % full, and no context is long
        (48, 4096, 196),
        (64, 2048, 0),
        (64, 131072, 196),
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
        assert paged_prefill.wanted_splits(query, cache, [(20, 30020)], 132, window=2000) == 3


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ([(20, 30020)], 16),  # 8 programs would run on 132 processors
        ([(20, 700)], 1),
        ([(20, 30020), (500, 500)], 3),  # 136 programs: the long ones would end last
        ([(20, 30020), (0, 30000)], 16),
        ([(20, 131092), (44, 44)], 16),
        ([(20, 131092), (44, 44), *[(0, 0)] * 14], 3),  # a graph: room for 16 prompts
        ([(64, 131072), *[(0, 0)] * 15], 3),
        ([(20, 131092), (2048, 2048)], 1),  # too many blocks to split all of them
        ([(4096, 4096)], 1),
        ([(512, 8704)], 1),
        ([(500, 500)] * 9, 1),
        ([], 1),
    ],
)
def test_prefills_on_an_h200_with_8_kv_heads(batch, expected):
    with dry_run.target(90):
        query, cache = tensors(sum(new for new, _ in batch))
        assert paged_prefill.wanted_splits(query, cache, batch, 132) == expected


sequences = st.tuples(st.integers(0, 3000), st.integers(0, 100_000))


@given(st.lists(sequences, max_size=9), st.sampled_from([(4, 1), (14, 2), (32, 8), (130, 1)]))
def test_prefills_never_need_more_scratch_than_promised(batch, heads):
    batch = [(new, new + cached) for new, cached in batch]
    num_tokens = sum(new for new, _ in batch)
    with dry_run.target(90):
        query, cache = tensors(num_tokens, *heads)
        splits = paged_prefill.wanted_splits(query, cache, batch, 132)
        most = paged_prefill.max_slots(query, cache, 132, 2**17)
    assert splits == 1 or num_tokens * splits <= most


def tensors(num_tokens, num_heads=32, num_kv_heads=8):
    query = torch.empty(num_tokens, num_heads, 128, dtype=torch.bfloat16)
    return query, torch.empty(0, 16, num_kv_heads, 128, dtype=torch.bfloat16)
