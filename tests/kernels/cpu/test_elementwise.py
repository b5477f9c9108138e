"""The C++ element-wise kernels against their torch twins, which are tested against fp64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kernels.cache.torch_cache import write_kv as twin_write_kv
from kernels.cpu import elementwise
from kernels.cpu.cache import write_kv
from kernels.elementwise import torch_elementwise
from tests.kernels.caches import bits, make_cache
from tests.kernels.elementwise_inputs import check_close, strided

DTYPES = [torch.float32, torch.bfloat16]
EPS = 1e-5
MANY = 600
"""Enough tokens for several threads."""


@pytest.fixture
def no_twins(monkeypatch):
    """Fail if the kernel falls back to torch."""
    monkeypatch.setattr(elementwise, "torch_elementwise", SimpleNamespace())


def make_weight(width, dtype):
    return torch.rand(width, generator=torch.Generator().manual_seed(1)).add(0.5).to(dtype)


@pytest.mark.usefixtures("no_twins")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 64), (3, 896), (MANY, 80), (5, 3, 64), (MANY, 2, 16)])
@pytest.mark.parametrize(
    "options", [{}, {"rounds_first": False}, {"offset": 1.0, "rounds_first": False}]
)
def test_rms_norm(shape, dtype, options):
    rows, weight = strided(*shape, dtype=dtype), make_weight(shape[-1], dtype)
    exact = torch_elementwise.rms_norm(rows.double().float(), weight.float(), EPS, **options)
    out = elementwise.rms_norm(rows, weight, EPS, **options)
    assert out.is_contiguous()
    check_close(out, exact.double())
    twin = torch_elementwise.rms_norm(rows, weight, EPS, **options)
    assert (out != twin).float().mean() < (1 if dtype == torch.float32 else 0.02)


@pytest.mark.usefixtures("no_twins")
def test_rms_norm_of_heads_in_a_transposed_tensor():
    rows, weight = strided(5, 3, 64, dtype=torch.float32), make_weight(64, torch.float32)
    out = elementwise.rms_norm(rows.transpose(0, 1), weight, EPS)
    assert torch.equal(out.transpose(0, 1), elementwise.rms_norm(rows, weight, EPS))


@pytest.mark.usefixtures("no_twins")
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(5, 48), (2, 2816), (MANY, 64)])
def test_gated_activation(tokens, width, dtype, activation):
    gate_up = strided(tokens, 2 * width, dtype=dtype)
    out = elementwise.gated_activation(gate_up, activation)
    check_close(out, torch_elementwise.gated_activation(gate_up.double(), activation))
    twin = torch_elementwise.gated_activation(gate_up, activation)
    assert ((out - twin).abs() > 1e-5 * out.abs().max()).float().mean() < 0.02


@pytest.mark.usefixtures("no_twins")
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_large_gates_give_zero_or_themselves(activation):
    gates = torch.tensor([-1e30, -200.0, 0.0, 200.0, 1e30, *[0.0] * 11])
    out = elementwise.gated_activation(torch.cat([gates, torch.ones(16)])[None], activation)
    assert out[0, :5].tolist() == [0.0, 0.0, 0.0, 200.0, torch.tensor(1e30).item()]


@pytest.mark.usefixtures("no_twins")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "head_dim", "rotary_dim"),
    [((4, 2), 64, 64), ((3, 1), 96, 32), ((1, 1), 256, 256), ((2, 5), 64, 32)],
)
@pytest.mark.parametrize("tokens", [5, MANY])
def test_rotary(tokens, heads, head_dim, rotary_dim, dtype):
    rows = strided(tokens, sum(heads) + heads[1], head_dim, dtype=dtype)
    query, key, value = rows.split((*heads, heads[1]), 1)
    value_before = value.clone()
    for width in (rotary_dim, rotary_dim // 2):
        angle = torch.rand(tokens, width, generator=torch.Generator().manual_seed(5)) * 7
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        exact = [rows.double() for rows in (query, key)]
        torch_elementwise.rotary(*exact, cos.double(), sin.double(), rotary_dim)
        elementwise.rotary(query, key, cos, sin, rotary_dim)
        for got, expected in zip((query, key), exact, strict=True):
            # The error of this sum of two products is relative to the products, not to the sum.
            torch.testing.assert_close(
                got.double(), expected, rtol=0.0, atol=torch.finfo(dtype).eps * expected.abs().max()
            )
    assert torch.equal(value, value_before)


def test_unsupported_inputs_fall_back_to_torch():
    odd = torch.randn(3, 24, dtype=torch.float32)
    half = torch.randn(3, 32, dtype=torch.float16)
    for rows in (odd, half):
        weight = make_weight(rows.shape[1], rows.dtype)
        got = elementwise.rms_norm(rows, weight, EPS)
        assert torch.equal(got, torch_elementwise.rms_norm(rows, weight, EPS))
        got = elementwise.gated_activation(rows, "silu")
        torch.testing.assert_close(got, torch_elementwise.gated_activation(rows, "silu"))
    query, key = torch.randn(2, 3, 2, 24).unbind()
    twins = query.clone(), key.clone()
    angles = torch.randn(2, 3, 24).unbind()
    elementwise.rotary(query, key, *angles, 24)
    torch_elementwise.rotary(*twins, *angles, 24)
    assert torch.equal(query, twins[0])
    assert torch.equal(key, twins[1])


def test_invalid_shapes_change_nothing():
    """Wrong shapes raise the errors of the torch versions, before anything is written."""
    query, key = torch.ones(2, 3, 2, 64).unbind()
    angles = torch.ones(2, 3, 64).unbind()
    with pytest.raises(RuntimeError):
        elementwise.rotary(query, key, *angles, 128)
    assert (query == 1).all()
    with pytest.raises(RuntimeError):
        elementwise.rms_norm(torch.ones(3, 64), torch.ones(32), EPS)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [5, MANY])
def test_write_kv_writes_only_its_slots(tokens, dtype, layout):
    rows = [strided(tokens, 3, dim, dtype=dtype, seed=dim) for dim in (48, 16)]
    slots = torch.randperm(4 * 256, generator=torch.Generator().manual_seed(3))[:tokens]
    slots[1] = slots[4] = -1
    caches, twins = (
        [make_cache(256, 4, 3, dim, dtype, layout) for dim in (48, 16)] for _ in range(2)
    )
    write_kv(*rows, *caches, slots)
    twin_write_kv(*rows, *twins, slots)
    for cache, twin in zip(caches, twins, strict=True):
        assert torch.equal(bits(cache), bits(twin))
