"""The table of tile sizes and the rule for the number of splits."""

from __future__ import annotations

import json
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import dry_run
from kernels.configurations import TABLE, attention_configuration, num_splits
from kernels.paged_arguments import HEAD_DIMS

NAMES = {"arch", "head_dim", "group", "query_bits", "kv_bits"}


@pytest.mark.parametrize("kernel", ["decode", "prefill"])
def test_rows_are_well_formed_and_the_last_matches_all(kernel):
    rows = json.loads(TABLE.read_text())[kernel]
    assert rows[-1]["when"] == {}
    for row in rows:
        assert row["when"].keys() <= NAMES
        assert all(isinstance(values, list) for values in row["when"].values())
        tiles = [row["use"][name] for name in ("block_m", "block_n", "num_warps")]
        assert all(tile & (tile - 1) == 0 for tile in tiles)
        assert min(row["use"]["block_m"], row["use"]["block_n"]) >= 16  # tl.dot needs it


@pytest.mark.parametrize("kernel", ["decode", "prefill"])
def test_every_gpu_and_shape_matches_a_row(kernel):
    for arch in (*dry_run.ARCHS, 100, 120):
        with dry_run.target(arch):
            for head_dim, dtype in product(HEAD_DIMS, (torch.bfloat16, torch.uint8)):
                assert attention_configuration(kernel, head_dim, 4, torch.bfloat16, dtype)


def test_the_current_gpu_selects_the_row():
    def tile(arch):
        with dry_run.target(arch):
            return attention_configuration("prefill", 256, 4, torch.half, torch.half)

    assert tile(90) != tile(86)


counts = st.integers(1, 512)


@given(counts, st.sampled_from([1, 2, 8, 32, 71]), st.sampled_from([58, 80, 108, 132]), counts)
def test_splits_fill_the_gpu_but_are_not_too_short(num_rows, num_kv_heads, num_processors, blocks):
    longest = blocks * 256
    splits = num_splits(num_rows, num_kv_heads, num_processors, longest)
    assert splits & (splits - 1) == 0
    assert 1 <= splits <= 64
    assert splits == 1 or longest / splits > 128  # the power of two may round up once
    programs = num_rows * num_kv_heads * splits
    assert programs >= 2 * num_processors or splits == 64 or splits >= blocks


@pytest.mark.parametrize(
    ("num_rows", "longest", "expected"),
    [(1, 32768, 64), (4, 32768, 16), (16, 4096, 4), (64, 4096, 1), (64, 131072, 4), (1, 256, 1)],
)
def test_splits_on_an_h200_with_8_kv_heads(num_rows, longest, expected):
    assert num_splits(num_rows, 8, 132, longest) == expected
