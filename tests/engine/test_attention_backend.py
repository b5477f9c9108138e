"""What reaches the Triton kernels is where the model left it, unless they cannot read it there."""

from __future__ import annotations

import pytest
import torch

from engine.attention.backends import TritonBackend
from engine.attention.call import AttentionCall
from kernels.batch import PagedBatch


@pytest.fixture
def seen():
    """What the kernels of `backend` were given."""
    return []


@pytest.fixture
def backend(seen):
    backend = TritonBackend(num_processors=4, max_model_len=64)
    backend._write_kv = lambda key, value, *_: seen.extend([key, value])
    backend._decode = backend._prefill = lambda query, *_, **__: seen.append(query)
    return backend


def run(backend, query, key, value, num_decodes):
    call = AttentionCall(0, query, key, value, 1.0, None, None, None)
    keys = torch.zeros(4, 16, key.shape[1], key.shape[2])
    unused = torch.zeros(1)
    batch = PagedBatch(unused, unused, unused, unused, (), num_decodes)
    backend.write(call, keys, keys, unused)
    backend.attend(call, keys, keys, batch)


@pytest.mark.parametrize("num_decodes", [0, 5])
def test_slices_of_one_product_are_not_copied(backend, seen, num_decodes):
    rows = torch.zeros(5, 8, 64).split((4, 2, 2), 1)
    run(backend, *rows, num_decodes)
    assert [each.data_ptr() for each in seen] == [rows[n].data_ptr() for n in (1, 2, 0)]


def test_rows_that_begin_anywhere_are_copied(backend, seen):
    rows = torch.rand(5, 8, 65)[..., :64].split((4, 2, 2), 1)
    run(backend, *rows, 0)
    assert all(each.is_contiguous() for each in seen)
    assert torch.equal(seen[2], rows[0])


def test_decodes_and_the_others_share_one_output(backend):
    """Two rows that decode, then a chunk of three: each kernel fills its part."""
    backend._decode = lambda query, *_, out, **__: out.fill_(1)
    backend._prefill = lambda query, *_, out, **__: out.fill_(2)
    query, key = torch.zeros(5, 4, 64), torch.zeros(5, 2, 64)
    call = AttentionCall(0, query, key, key, 1.0, None, None, None)
    lens = torch.zeros(3)
    batch = PagedBatch(torch.tensor([0, 3]), lens, lens, lens, (), num_decodes=2)
    attended = backend.attend(call, torch.zeros(4, 16, 2, 64), torch.zeros(4, 16, 2, 64), batch)
    assert attended[:, 0, 0].tolist() == [1, 1, 2, 2, 2]
