"""The attention kernels that `make gpu` compares with ours attend alike; see ../conftest.py."""

from __future__ import annotations

import pytest
import torch

from benchmarks.ids_ahead import ids_loaded_late
from tests.kernels.interpreted import test_paged_decode, test_paged_prefill


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("block_size", [16, 64])
def test_kernels_that_load_ids_late_attend_alike(block_size, ids):
    shape = {"block_size": block_size, "ids": ids, "dtype": torch.half}
    with ids_loaded_late():
        test_paged_decode.check(9, **shape)
        test_paged_prefill.check(test_paged_prefill.MIXED, num_splits=12, heads=(2, 1), **shape)
