"""Attention backends: tensors are only copied if the kernels cannot read them in place."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from core.configuration.kv_layout import LayerShape
from core.errors import ConfigurationError
from engine.attention.backends import CpuBackend, TorchBackend, make_backend
from engine.attention.call import AttentionCall, Rotation
from engine.attention.triton_backend import TritonBackend
from kernels import dry_run
from kernels.attention.batch import PagedBatch
from kernels.elementwise import torch_elementwise

CUDA = torch.device("cuda")


@pytest.fixture
def seen():
    """The tensors passed to the kernels of `backend`."""
    return []


@pytest.fixture
def made(monkeypatch):
    """The work lists that `backend` made: number of sequences, splits wanted, and window."""
    made = []

    def make(context_lens, num_wanted, *, window):
        made.append((len(context_lens), num_wanted, window))
        return made[-1]

    monkeypatch.setattr("engine.attention.triton_backend.make_work_list", make)
    return made


@pytest.fixture
def backend(seen, made):
    backend = TritonBackend(num_processors=4, max_model_len=64)
    backend._write_kv = lambda key, value, *_: seen.extend([key, value])
    backend._rotary_write_kv = lambda query, key, value, *_: seen.extend([query, key, value])
    backend._decode = backend._prefill = lambda query, *_, **__: seen.append(query)
    backend._decode_splits = lambda *_: 6
    backend._prefill_splits = lambda *_: 0
    backend._make_prefill_work = lambda *_, **__: None
    return backend


def run(backend, query, key, value, num_decodes, rotation=None):
    call = AttentionCall(0, query, key, value, 1.0, None, None, None, rotation)
    keys = torch.zeros(4, 16, key.shape[1], key.shape[2])
    unused = torch.zeros(6)
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


def test_a_latent_is_written_in_two_parts_and_read_as_key_and_value(backend, seen):
    """V is a view of the first dims of K's cache."""
    backend._write_kv = lambda *tensors: seen.extend(tensors[:4])
    query, key, cache = torch.zeros(5, 4, 320), torch.rand(5, 1, 320), torch.zeros(4, 16, 1, 320)
    call = AttentionCall(0, query, key, key[..., :0], 1.0, None, None, None, shared_dim=256)
    values, unused = cache[..., :256], torch.zeros(6)
    backend.write(call, cache, cache[..., :0], unused)
    expected = [key[..., :256], key[..., 256:], values, cache[..., 256:]]
    for got, part in zip(seen, expected, strict=True):
        assert (got.data_ptr(), got.shape) == (part.data_ptr(), part.shape)
    backend._decode = lambda query, keys, values, *_, out, **__: seen.append((values, out))
    attended = backend.attend(
        call, cache, values, PagedBatch(unused, unused, unused, unused, (), 5)
    )
    assert seen[-1][0] is values
    assert seen[-1][1].shape == attended.shape == (5, 4, 256)


def test_which_latents_have_kernels():
    def backend(key_dim, value_dim, **options):
        shape = LayerShape(1, key_dim, 0, shared_dim=value_dim)
        return make_backend(CUDA, [shape], 16, 64, torch.half, **options)

    with dry_run.target(90):
        assert isinstance(backend(576, 512)[0], TritonBackend)
        slow, (note,) = backend(40, 32)
        assert isinstance(slow, TorchBackend)
        assert "rows of 40 are no latents" in note
        with pytest.raises(ConfigurationError, match="products of latent attention; leave the opt"):
            backend(576, 512, in_segments=True)


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
    """Two decode rows precede a chunk of three rows. Each kernel fills its own part."""
    backend._decode = lambda query, *_, out, **__: out.fill_(1)
    backend._prefill = lambda query, *_, out, **__: out.fill_(2)
    query, key = torch.zeros(5, 4, 64), torch.zeros(5, 2, 64)
    call = AttentionCall(0, query, key, key, 1.0, None, None, None)
    lens = torch.zeros(3)
    batch = PagedBatch(torch.tensor([0, 3]), lens, lens, lens, (), num_decodes=2)
    attended = backend.attend(call, torch.zeros(4, 16, 2, 64), torch.zeros(4, 16, 2, 64), batch)
    assert attended[:, 0, 0].tolist() == [1, 1, 2, 2, 2]


def test_layers_of_a_step_share_a_work_list_for_each_window(backend, made):
    works = []
    backend._decode = lambda *_, work, **__: works.append(work)
    query, key = torch.zeros(5, 4, 64), torch.zeros(5, 2, 64)
    for _ in range(2):
        lens = torch.zeros(5)
        batch = PagedBatch(torch.zeros(1), lens, lens, lens, None, num_decodes=5)
        groups = batch, batch.with_tables(lens, lens)
        for window in (None, 9, None, 9):
            call = AttentionCall(0, query, key, key, 1.0, window, None, None)
            backend.attend(call, *torch.zeros(2, 4, 16, 2, 64), groups[window is None])
    assert made == [(5, 6, None), (5, 6, 9)] * 2, "made again for a new batch"
    assert works == [made[0], made[1]] * 4


def test_prompts_are_split_by_their_lengths_or_by_limits(backend):
    seen = []

    def splits(query, keys, lengths, *limits):
        seen.append((lengths, limits))
        return 3

    def make(query, keys, starts, lens, num_splits, *, window):
        seen.append((len(query), len(starts), len(lens), num_splits, window))
        return f"list of window {window}"

    backend._prefill_splits, backend._make_prefill_work = splits, make
    backend._prefill = lambda *_, work, **__: seen.append(work)
    query, key = torch.zeros(6, 4, 64), torch.zeros(6, 2, 64)
    lens, caches = torch.zeros(3), torch.zeros(2, 4, 16, 2, 64)
    spans = ((0, 1, 9), (1, 3, 40), (3, 6, 3))
    batch = PagedBatch(torch.zeros(3), lens, lens, lens, spans, num_decodes=1)
    captured = replace(batch, spans=None, context_lens=torch.zeros(3))
    for step, lengths in ((batch, [(2, 40), (3, 3)]), (captured, None)):
        for window in (None, 9, None):
            call = AttentionCall(0, query, key, key, 1.0, window, None, None)
            backend.attend(call, *caches, step)
        # Layers share a list for each window. In a graph, only the device knows the lengths.
        assert seen == [
            (lengths, (4, 64, None)), (5, 3, 2, 3, None), "list of window None",
            (lengths, (4, 64, 9)), (5, 3, 2, 3, 9), "list of window 9",
            "list of window None",
        ]  # fmt: skip
        seen.clear()


def test_scratch_is_bounded_by_shapes_and_the_longest_context():
    query, key = torch.zeros(2048, 40, 128, dtype=torch.bfloat16).split((32, 8), 1)
    call = AttentionCall(0, query, key, key, 1.0, None, None, None)
    with dry_run.target(90):
        for max_model_len, expected in ((256, 0), (131072, 4 * 2 * 132 // 8 * 32 * 32 * 129 * 4)):
            backend = TritonBackend(132, max_model_len)
            assert backend.scratch_bytes(call, torch.bfloat16, 64) == expected
