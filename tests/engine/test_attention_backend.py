"""What reaches the Triton kernels is where the model left it, unless they cannot read it there."""

from __future__ import annotations

import pytest
import torch

from engine.attention import AttentionCall
from engine.attention_backend import TritonBackend
from kernels.batch import PagedBatch


@pytest.fixture
def seen():
    """What the kernels of `backend` were given."""
    return []


@pytest.fixture
def backend(seen):
    backend = TritonBackend(num_processors=4)
    backend._write_kv = lambda key, value, *_: seen.extend([key, value])
    backend._decode = backend._prefill = lambda query, *_, **__: seen.append(query)
    return backend


def run(backend, query, key, value, num_sequences):
    call = AttentionCall(0, query, key, value, 1.0, None, None, None)
    keys = torch.zeros(4, 16, key.shape[1], key.shape[2])
    unused = torch.zeros(1)
    spans = ((0, len(query), len(query)),) * num_sequences
    batch = PagedBatch(unused, unused, unused, unused, spans)
    backend.write(call, keys, keys, unused)
    backend.attend(call, keys, keys, batch)


@pytest.mark.parametrize("num_sequences", [1, 5])
def test_slices_of_one_product_are_not_copied(backend, seen, num_sequences):
    rows = torch.zeros(5, 8, 64).split((4, 2, 2), 1)
    run(backend, *rows, num_sequences)
    assert [each.data_ptr() for each in seen] == [rows[n].data_ptr() for n in (1, 2, 0)]


def test_rows_that_begin_anywhere_are_copied(backend, seen):
    rows = torch.rand(5, 8, 65)[..., :64].split((4, 2, 2), 1)
    run(backend, *rows, 1)
    assert all(each.is_contiguous() for each in seen)
    assert torch.equal(seen[2], rows[0])
