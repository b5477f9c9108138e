"""Operations of layers with state in Triton's interpreter, with NaN in all slots that are not read.

See ../conftest.py.
"""

from __future__ import annotations

import pytest
import torch

from kernels.state import reference
from kernels.state.conv_rows import conv_rows
from kernels.state.scan import scan
from kernels.state.state_step import state_step
from kernels.state.state_tiles import state_tiles
from tests.kernels.state_inputs import MIXED, Chunk, make_batch, make_pool, make_scan, make_tokens

TOLERANCE = {torch.float32: 5e-5, torch.bfloat16: 2e-2}
NAN = 1e9
"""Stands for NaN where pools are compared."""
CHUNKS = [
    Chunk(1, 0, {1: 0}),
    Chunk(1, -1, {1: 1}),
    Chunk(1, 2, {1: 3}),
    Chunk(1),  # padding
    Chunk(2, 10, {2: 10}),
    Chunk(21, -1, {1: 4, 21: 5}),
    Chunk(7, 6, {2: 7, 5: 8, 7: 6}),
    Chunk(5, 2, {3: 9}),  # reads what another sequence reads, and does not keep its end
]


def check_close(got, expected, dtype):
    got, expected = (part.float().nan_to_num(NAN) for part in (got, expected))
    torch.testing.assert_close(got, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.matrix
@pytest.mark.parametrize("is_delta", [True, False])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", [(2, 4, 32, 64), (1, 2, 64, 16), (1, 1, 128, 32)])
def test_steps(heads, dtype, state_dtype, is_delta):
    batch, shape = make_batch(CHUNKS), (heads[1], *heads[2:])
    tokens = make_tokens(len(batch.writes), heads, dtype)
    pools = [make_pool(shape, state_dtype) for _ in range(2)]
    got, expected = (
        form(**tokens, states=pool, batch=batch, is_delta=is_delta)
        for form, pool in zip((state_step, reference.state_step), pools, strict=True)
    )
    assert got.dtype == dtype
    check_close(got, expected, dtype)
    check_close(*pools, state_dtype)
    assert torch.equal(pools[0].isnan(), pools[1].isnan())


@pytest.mark.matrix
@pytest.mark.parametrize("is_delta", [True, False])
@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("heads", [(1, 2, 32, 16), (2, 2, 128, 32)])
def test_tiles(heads, skips, is_delta):
    batch, shape = make_batch(MIXED), (heads[1], *heads[2:])
    tokens = make_tokens(len(batch.writes), heads, torch.bfloat16)
    if not skips:
        tokens["skip"] = None
    pools = [make_pool(shape) for _ in range(2)]
    got, expected = (
        form(**tokens, states=pool, batch=batch, is_delta=is_delta)
        for form, pool in zip((state_tiles, reference.state_step), pools, strict=True)
    )
    check_close(got, expected, torch.bfloat16)
    states, exact = (pool.nan_to_num(NAN) for pool in pools)
    torch.testing.assert_close(states, exact, rtol=1e-3, atol=1e-3)
    assert torch.equal(pools[0].isnan(), pools[1].isnan())


@pytest.mark.matrix
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(16, 64), (16, 144), (32, 16), (256, 48)])
def test_scans(shape, dtype, state_dtype):
    batch = make_batch(CHUNKS)
    tokens, pools = (
        make_scan(len(batch.writes), *shape, dtype),
        [make_pool(shape, state_dtype) for _ in range(2)],
    )
    got, expected = (
        form(**tokens, states=pool, batch=batch)
        for form, pool in zip((scan, reference.scan), pools, strict=True)
    )
    assert got.dtype == dtype
    check_close(got, expected, dtype)
    check_close(*pools, state_dtype)
    assert torch.equal(pools[0].isnan(), pools[1].isnan())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 12}, "the first must be among"),
        ({"state_dtype": torch.float16}, "float32 or bfloat16"),
        ({"state_size": 32}, "a slot must be dense"),
        ({"rate": torch.float16}, "gates must be contiguous fp32"),
        ({"query": torch.float16}, r"expected 16 columns"),
    ],
)
def test_unsupported_scans_are_rejected(change, message):
    size = change.get("size", 16)
    tokens = make_scan(4, size, 32)
    for name in ("rate", "query"):
        tokens[name] = tokens[name].to(change.get(name, torch.float32))
    shape = (change.get("state_size", size), 32)
    pool = make_pool(shape, change.get("state_dtype", torch.float32))
    with pytest.raises(ValueError, match=message):
        scan(**tokens, states=pool, batch=make_batch(CHUNKS[:4]))


def test_keys_that_repeat():
    """Their system has ones below the diagonal, and its powers grow."""
    batch, heads = make_batch([Chunk(64, -1, {64: 0})]), (1, 1, 32, 16)
    tokens = make_tokens(64, heads, torch.bfloat16)
    tokens["key"] = torch.ones_like(tokens["key"])
    tokens |= {"decay": torch.zeros(64, 1), "rate": torch.ones(64, 1)}
    pools = [make_pool((1, 32, 16)) for _ in range(2)]
    for form, pool in zip((state_tiles, reference.state_step), pools, strict=True):
        form(**tokens, states=pool, batch=batch, is_delta=True)
    torch.testing.assert_close(pools[0][0], pools[1][0], rtol=1e-3, atol=1e-3)


@pytest.mark.matrix
@pytest.mark.parametrize("options", ["", "silu bias", "gates"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("taps", "channels"), [(2, 16), (3, 48), (4, 128), (4, 1040)])
def test_convolutions(taps, channels, dtype, options):
    batch = make_batch(CHUNKS)
    size = (len(batch.writes), 3 * channels)
    generator = torch.Generator().manual_seed(2)
    before, after, rows = torch.randn(size, generator=generator).to(dtype).chunk(3, 1)
    weight, bias = torch.randn(taps + 1, channels, generator=generator).to(dtype).split([taps, 1])
    given = {"silu": "silu" in options}
    if "gates" in options:
        given |= {"before": before, "after": after}
    pools = [make_pool((taps - 1, channels), dtype) for _ in range(2)]
    got, expected = (
        form(rows, weight, bias[0] if "bias" in options else None, pool, batch, **given)
        for form, pool in zip((conv_rows, reference.conv_rows), pools, strict=True)
    )
    check_close(got, expected, dtype)
    assert torch.equal(pools[0].nan_to_num(NAN), pools[1].nan_to_num(NAN))


def test_decodes_alone():
    batch = make_batch(CHUNKS[:4])
    tokens, shape = make_tokens(4, (1, 2, 32, 32)), (2, 32, 32)
    alone = state_step(**tokens, states=make_pool(shape), batch=batch, is_delta=True)
    expected = reference.state_step(**tokens, states=make_pool(shape), batch=batch, is_delta=True)
    check_close(alone, expected, torch.float32)
    rows, weight, pools = torch.randn(4, 48), torch.randn(4, 48), [make_pool((3, 48)) for _ in "ab"]
    got = conv_rows(rows, weight, None, pools[0], batch)
    check_close(got, reference.conv_rows(rows, weight, None, pools[1], batch), torch.float32)
    assert torch.equal(pools[0].nan_to_num(NAN), pools[1].nan_to_num(NAN))


def test_a_chunk_has_the_bits_of_its_tokens_alone():
    heads, length = (1, 2, 32, 32), 9
    tokens, pools = make_tokens(length, heads), [make_pool((2, 32, 32)) for _ in range(2)]
    whole = make_batch([Chunk(length, 0, {length: 0})])
    expected = state_step(**tokens, states=pools[0], batch=whole, is_delta=True)
    for row in range(length):
        step = {
            name: part if name == "skip" else part[row : row + 1] for name, part in tokens.items()
        }
        one = make_batch([Chunk(1, 0, {1: 0})])
        got = state_step(**step, states=pools[1], batch=one, is_delta=True)
        assert torch.equal(got[0], expected[row])
    assert torch.equal(pools[0][0], pools[1][0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key_dim": 48}, "both dims must be among"),
        ({"state_dtype": torch.float16}, "float32 or bfloat16"),
        ({"decay": torch.float16}, "gates must be contiguous fp32"),
        ({"query": torch.float16}, "all must be of one type"),
    ],
)
def test_unsupported_tensors_are_rejected(change, message):
    dim = change.get("key_dim", 32)
    tokens = make_tokens(4, (1, 2, dim, 32))
    for name in ("decay", "query"):
        tokens[name] = tokens[name].to(change.get(name, torch.float32))
    pool = make_pool((2, dim, 32), change.get("state_dtype", torch.float32))
    with pytest.raises(ValueError, match=message):
        state_step(**tokens, states=pool, batch=make_batch(CHUNKS[:4]), is_delta=True)


def test_convolutions_of_other_shapes_are_rejected():
    rows, batch = torch.zeros(4, 32), make_batch(CHUNKS[:4])
    for taps, tails in ((5, make_pool((4, 32))), (3, make_pool((3, 32)))):
        with pytest.raises(ValueError, match="must be"):
            conv_rows(rows, torch.zeros(taps, 32), None, tails, batch)
