"""The C++ operations of layers with state against their torch twins, with NaN in unused slots."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.cpu import state
from kernels.state import reference
from tests.kernels.state_inputs import (
    HEADS,
    MIXED,
    OPERATIONS,
    Chunk,
    check_same_bits,
    make_batch,
    make_pool,
    make_scan,
    make_tokens,
)

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 5e-5, torch.bfloat16: 2e-2}
NAN = 1e9
"""Stands for NaN where pools are compared."""


@pytest.fixture
def no_twins(monkeypatch):
    """Fail if the kernel falls back to torch."""
    monkeypatch.setattr(state, "reference", SimpleNamespace())


def check_close(got, expected, dtype):
    for one, other in zip(got, expected, strict=True):
        one, other = one.float().nan_to_num(NAN), other.float().nan_to_num(NAN)
        torch.testing.assert_close(one, other, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.usefixtures("no_twins")
@pytest.mark.parametrize("is_delta", [True, False])
@pytest.mark.parametrize("state_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [*HEADS, (1, 1, 48, 80), (1, 2, 256, 16)])
def test_recurrences(target, heads, dtype, state_dtype, is_delta):
    batch, shape = make_batch(MIXED), (heads[1], *heads[2:])
    tokens = make_tokens(len(batch.writes), heads, dtype)
    pools = [make_pool(shape, state_dtype) for _ in range(2)]
    got = state.state_step(**tokens, states=pools[0], batch=batch, is_delta=is_delta)
    expected = reference.state_step(**tokens, states=pools[1], batch=batch, is_delta=is_delta)
    assert got.dtype == dtype
    assert got.is_contiguous()
    check_close([got], [expected], dtype)
    check_close(pools[:1], pools[1:], state_dtype)
    assert torch.equal(pools[0].isnan(), pools[1].isnan())


@pytest.mark.usefixtures("no_twins")
@pytest.mark.parametrize("state_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(16, 64), (12, 144), (1, 16), (256, 80)])
def test_scans(target, shape, dtype, state_dtype):
    batch = make_batch(MIXED)
    tokens = make_scan(len(batch.writes), *shape, dtype)
    pools = [make_pool(shape, state_dtype) for _ in range(2)]
    got = state.scan(**tokens, states=pools[0], batch=batch)
    expected = reference.scan(**tokens, states=pools[1], batch=batch)
    assert got.dtype == dtype
    assert got.is_contiguous()
    check_close([got], [expected], dtype)
    check_close(pools[:1], pools[1:], state_dtype)
    assert torch.equal(pools[0].isnan(), pools[1].isnan())


@pytest.mark.usefixtures("no_twins")
@pytest.mark.parametrize("options", ["", "silu", "bias", "gates", "silu bias gates"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("taps", "channels"), [(2, 16), (3, 48), (4, 128), (4, 400), (8, 144)])
def test_convolutions(target, taps, channels, dtype, options):
    batch = make_batch(MIXED)
    generator = torch.Generator().manual_seed(2)
    size = (len(batch.writes), 3 * channels)
    before, after, rows = torch.randn(size, generator=generator).to(dtype).chunk(3, 1)
    weight, bias = torch.randn(taps + 1, channels, generator=generator).to(dtype).split([taps, 1])
    pools = [make_pool((taps - 1, channels), dtype) for _ in range(2)]
    given: dict[str, Any] = {"silu": "silu" in options}
    if "gates" in options:
        given |= {"before": before, "after": after}
    got, expected = (
        module.conv_rows(rows, weight, bias[0] if "bias" in options else None, pool, batch, **given)
        for module, pool in zip((state, reference), pools, strict=True)
    )
    assert got.is_contiguous()
    check_close([got], [expected], dtype)
    assert torch.equal(pools[0].nan_to_num(NAN), pools[1].nan_to_num(NAN))


@pytest.mark.usefixtures("no_twins")
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_has_the_same_bits_in_any_chunk_and_batch(target, dtype, operation):
    check_same_bits(operation, state, (2, 4, 32, 80), dtype)


@pytest.mark.usefixtures("no_twins")
@pytest.mark.parametrize("is_delta", [True, False])
@pytest.mark.parametrize("num_heads", [1, 4, 16, 37])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates(target, dtype, num_heads, is_delta):
    generator = torch.Generator().manual_seed(4)
    both = (torch.randn(70, 2 * num_heads, generator=generator) * 20).to(dtype)
    rates, time = both.chunk(2, 1)
    scale, offset = -torch.rand(2, num_heads, generator=generator)
    given = (time, rates if is_delta else None, scale, offset)
    decay, rate = state.state_gates(*given)
    expected = reference.state_gates(*given)
    torch.testing.assert_close(decay, expected[0], rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(
        rate, expected[1], rtol=1e-2 if is_delta and dtype == torch.bfloat16 else 1e-5, atol=1e-8
    )
    if is_delta:
        assert torch.equal(rate, rate.to(dtype).float()), "a sigmoid is rounded"
    for row in (0, 33, 69):
        alone = state.state_gates(
            time[row:][:1], rates[row:][:1] if is_delta else None, scale, offset
        )
        assert torch.equal(torch.cat(alone), torch.stack([decay[row], rate[row]]))


@pytest.mark.usefixtures("no_twins")
def test_results_may_overwrite_their_inputs():
    batch, heads = make_batch(MIXED), HEADS[0]
    tokens, shape = make_tokens(len(batch.writes), heads), (heads[1], *heads[2:])
    expected = state.state_step(**tokens, states=make_pool(shape), batch=batch, is_delta=True)
    kernel = state.recurrence(**tokens, states=make_pool(shape), out=tokens["value"], is_delta=True)
    kernel.arguments.set_batch(batch)
    state.run(kernel)
    assert torch.equal(tokens["value"], expected)
    rows, weight = torch.randn(len(batch.writes), 48), torch.randn(4, 48)
    expected = state.conv_rows(rows, weight, None, make_pool((3, 48)), batch)
    kernel = state.convolution(rows, weight, None, make_pool((3, 48)), rows)
    kernel.arguments.set_batch(batch)
    state.run(kernel)
    assert torch.equal(rows, expected)


def test_unsupported_inputs_fall_back_to_torch():
    batch = make_batch([Chunk(1, 0, {1: 0}), Chunk(5, -1, {5: 1})])
    for heads, dtype in (((1, 2, 24, 32), torch.float32), ((1, 2, 32, 32), torch.float16)):
        tokens, shape = make_tokens(6, heads, dtype), (heads[1], *heads[2:])
        got, expected = (
            module.state_step(**tokens, states=make_pool(shape), batch=batch, is_delta=True)
            for module in (state, reference)
        )
        assert torch.equal(got, expected)
        shape = (16, 32 if dtype == torch.float16 else 24)
        tokens = make_scan(6, *shape, dtype)
        got, expected = (
            module.scan(**tokens, states=make_pool(shape), batch=batch)
            for module in (state, reference)
        )
        assert torch.equal(got, expected)
        rows, weight = torch.randn(6, 24).to(dtype), torch.randn(3, 24).to(dtype)
        got, expected = (
            module.conv_rows(rows, weight, None, make_pool((2, 24), dtype), batch)
            for module in (state, reference)
        )
        assert torch.equal(got, expected)


def test_slots_of_other_types_are_rejected():
    batch = make_batch([Chunk(5, -1, {5: 1})])
    wrong = state.StateBatch(batch.starts.long(), batch.reads, batch.writes, None)
    with pytest.raises(ValueError, match="starts is"):
        state.conv_rows(torch.zeros(5, 16), torch.zeros(3, 16), None, make_pool((2, 16)), wrong)
