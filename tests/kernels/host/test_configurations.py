"""The table of tile sizes."""

from __future__ import annotations

import json
from itertools import product

import pytest
import torch

from kernels import dry_run
from kernels.arguments import HEAD_DIMS
from kernels.configurations import TABLE, attention_configuration

NAMES = {"arch", "head_dim", "group", "query_bits", "kv_bits"}


@pytest.mark.parametrize("kernel", ["decode", "prefill", "segments"])
def test_rows_are_well_formed_and_the_last_matches_all(kernel):
    rows = json.loads(TABLE.read_text())[kernel]
    assert rows[-1]["when"] == {}
    for row in rows:
        assert row["when"].keys() <= NAMES | {"max_group"}
        assert isinstance(row["when"].get("max_group", 1), int)
        assert all(isinstance(row["when"][name], list) for name in NAMES & row["when"].keys())
        tiles = [row["use"][name] for name in ("block_m", "block_n", "num_warps")]
        assert all(tile & (tile - 1) == 0 for tile in tiles)
        assert min(row["use"]["block_m"], row["use"]["block_n"]) >= 16  # tl.dot needs it


@pytest.mark.parametrize("kernel", ["decode", "prefill", "segments"])
def test_every_gpu_and_shape_matches_a_row(kernel):
    for arch in (*dry_run.ARCHS, 100, 120):
        with dry_run.target(arch):
            for head_dim, dtype in product(HEAD_DIMS, (torch.bfloat16, torch.uint8)):
                assert attention_configuration(kernel, head_dim, 4, torch.bfloat16, dtype)


@pytest.mark.parametrize(("group", "rows"), [(1, 16), (13, 16), (16, 16), (17, 32)])
def test_a_row_may_be_for_small_groups(group, rows):
    with dry_run.target(90):
        row = attention_configuration("decode", 128, group, torch.bfloat16, torch.uint8)
    assert row.block_m == rows


def test_the_current_gpu_selects_the_row():
    def tile(arch):
        with dry_run.target(arch):
            return attention_configuration("prefill", 256, 4, torch.half, torch.half)

    assert tile(90) != tile(86)
