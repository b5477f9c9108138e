"""Attention backends: tensors are only copied if the kernels cannot read them in place."""

from __future__ import annotations

import pytest
import torch

from engine.attention.backends import CpuBackend, TorchBackend, TritonBackend
from engine.attention.call import AttentionCall, Rotation
from kernels import torch_elementwise
from kernels.batch import PagedBatch


@pytest.fixture
def seen():
    """The tensors passed to the kernels of `backend`."""
    return []


@pytest.fixture
def backend(seen):
    backend = TritonBackend(num_processors=4, max_model_len=64)
    backend._write_kv = lambda key, value, *_: seen.extend([key, value])
    backend._rotary_write_kv = lambda query, key, value, *_: seen.extend([query, key, value])
    backend._decode = backend._prefill = lambda query, *_, **__: seen.append(query)
    return backend


def run(backend, query, key, value, num_decodes, rotation=None):
    call = AttentionCall(0, query, key, value, 1.0, None, None, None, rotation)
    keys = torch.zeros(4, 16, key.shape[1], key.shape[2])
    unused = torch.zeros(1)
    batch = PagedBatch(unused, unused, unused, unused, (), num_decodes)
    backend.write(call, keys, keys, unused)
    backend.attend(call, keys, keys, batch)


@pytest.mark.parametrize("num_decodes", [0, 5])
def test_slices_of_one_product_are_not_copied(backend, seen, num_decodes):
    rows = torch.zeros(5, 8, 64).split((4, 2, 2), 1)
    run(backend, *rows, num_decodes)
    assert [tensor.data_ptr() for tensor in seen] == [rows[n].data_ptr() for n in (1, 2, 0)]


def test_unaligned_rows_are_copied(backend, seen):
    rows = torch.rand(5, 8, 65)[..., :64].split((4, 2, 2), 1)
    run(backend, *rows, 0)
    assert all(tensor.is_contiguous() for tensor in seen)
    assert torch.equal(seen[2], rows[0])


def test_queries_are_rotated_in_place_even_if_attention_needs_a_copy(backend, seen):
    rows = torch.rand(5, 8, 65)[..., :64].split((4, 2, 2), 1)
    run(backend, *rows, 0, Rotation(torch.ones(5, 32), torch.zeros(5, 32), 64))
    rotated, key, value, attended = seen
    assert rotated.data_ptr() == rows[0].data_ptr()
    assert all(tensor.is_contiguous() for tensor in (key, value, attended))


@pytest.mark.parametrize("make", [TorchBackend, CpuBackend])
def test_cpu_backends_rotate_before_they_write(make):
    angle = torch.rand(5, 32) * 7
    cos, sin = angle.cos(), angle.sin()
    query, key, value = torch.randn(5, 8, 64).split((4, 2, 2), 1)
    slots = torch.tensor([3, -1, 17, 0, 40])
    rotated, calls = [query.clone(), key.clone()], []
    torch_elementwise.rotary(*rotated, cos, sin, 64)
    calls.append(AttentionCall(0, *rotated, value, 1.0, None, None, None))
    rotation = Rotation(cos, sin, 64)
    calls.append(AttentionCall(0, query, key, value, 1.0, None, None, None, rotation))
    caches = [torch.zeros(2, 3, 2, 16, 64).transpose(2, 3) for _ in calls]
    for call, cache in zip(calls, caches, strict=True):
        make().write(call, *cache, slots)
    torch.testing.assert_close(caches[1], caches[0])
    torch.testing.assert_close(query, rotated[0])
    assert not torch.equal(caches[0][0], torch.zeros_like(caches[0][0]))


def test_decodes_and_prefills_share_one_output(backend):
    """Two decode rows, then a chunk of three: each kernel fills its part."""
    backend._decode = lambda query, *_, out, **__: out.fill_(1)
    backend._prefill = lambda query, *_, out, **__: out.fill_(2)
    query, key = torch.zeros(5, 4, 64), torch.zeros(5, 2, 64)
    call = AttentionCall(0, query, key, key, 1.0, None, None, None)
    lens = torch.zeros(3)
    batch = PagedBatch(torch.tensor([0, 3]), lens, lens, lens, (), num_decodes=2)
    attended = backend.attend(call, torch.zeros(4, 16, 2, 64), torch.zeros(4, 16, 2, 64), batch)
    assert attended[:, 0, 0].tolist() == [1, 1, 2, 2, 2]
