"""The attention kernels load block ids one tile ahead, but never past the end of the block table.

Block tables end where readable memory ends: a read past them is a segmentation fault.
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import replace

import pytest
import torch

from kernels.attention.paged_decode import paged_decode
from kernels.attention.paged_prefill import paged_prefill
from kernels.attention.prefill_splits import prefill_work
from kernels.attention.work_list import UNIT, make_work_list
from tests.kernels.paged_inputs import check_close, make_paged
from tests.kernels.reference import paged_decode_reference, paged_prefill_reference

SCALE = 0.1
PROT_NONE = 0


def guarded(table):
    """Return a copy of a table, with an inaccessible page after it, and its memory."""
    assert table.nbytes <= mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    pages = torch.frombuffer(memory, dtype=torch.uint8)
    guard = ctypes.c_void_p(pages.data_ptr() + mmap.PAGESIZE)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(guard, ctypes.c_size_t(mmap.PAGESIZE), PROT_NONE) == 0
    copy = pages[mmap.PAGESIZE - table.nbytes : mmap.PAGESIZE].view(table.dtype).view(table.shape)
    return copy.copy_(table), memory


def full_width(paged):
    """Return inputs whose block tables have no spare column and end where readable memory ends.

    Also return that memory, which must be kept.
    """
    table, memory = guarded(paged.block_tables[:, :-1].contiguous())
    return replace(paged, block_tables=table), memory


@pytest.mark.matrix
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("context", [1, 63, 64, 65, 128, 300])
def test_decode(context, block_size, ids):
    paged, _memory = full_width(
        make_paged([(1, 1), (1, 0), (1, context)], block_size=block_size, ids=ids)
    )
    expected = paged_decode_reference(*paged.decode_arguments, scale=SCALE)
    for work in (None, make_work_list(paged.context_lens, 6, min_split_keys=UNIT)):
        got = paged_decode(*paged.decode_arguments, scale=SCALE, work=work)
        check_close(got, expected)


@pytest.mark.matrix
@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("lengths", [(1, 1), (64, 64), (65, 65), (5, 128), (70, 300)])
def test_prefill(lengths, block_size, window):
    paged, _memory = full_width(make_paged([(1, 1), lengths], block_size=block_size))
    options = {"scale": SCALE, "window": window}
    expected = paged_prefill_reference(*paged.prefill_arguments, **options)
    sizes = (paged.query, paged.key_cache, paged.query_starts, paged.context_lens)
    for num_splits in (0, 9):
        work = prefill_work(*sizes, num_splits, window=window, min_split_keys=1)
        check_close(paged_prefill(*paged.prefill_arguments, work=work, **options), expected)


def test_a_long_chunk_of_padding_reads_nothing():
    """The chunk's first position is below zero, so its first tile would lie before the table."""
    paged = make_paged([(200, 200)])
    paged.context_lens.zero_()
    paged.key_cache.fill_(float("nan"))
    paged.value_cache.fill_(float("nan"))
    paged.block_tables.fill_(2**30)
    sizes = (paged.query, paged.key_cache, paged.query_starts, paged.context_lens)
    for num_splits in (0, 9):
        work = prefill_work(*sizes, num_splits, min_split_keys=1)
        assert (paged_prefill(*paged.prefill_arguments, work=work, scale=SCALE) == 0).all()
