"""Weight formats: the choice of format, exactness and memory."""

from __future__ import annotations

import pytest
import torch

from engine.model import linear
from engine.model.linear import Dense, Linear, Panels, Part, choose_format
from kernels.cpu.linear import has_pairs, is_faster
from kernels.cpu.shared_library import Target, unavailable_reason

CPU = torch.device("cpu")


@pytest.fixture
def needs_a_compiler():
    reason = unavailable_reason()
    if reason is not None:
        pytest.skip(reason)


def make_parts(sizes=(32, 16, 7), depth=24, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, depth, generator=generator).to(dtype) for size in sizes]


@pytest.mark.parametrize("sizes", [(32, 16, 7), (5, 40), (3,)])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_panels_multiply_like_the_whole_weight(needs_a_compiler, sizes, stored, dtype):
    """Some parts start at a panel boundary, and others do not."""
    parts = make_parts(sizes, dtype=stored)
    whole, rows = torch.cat(parts).to(dtype), torch.randn(5, 24).to(dtype)
    format = Panels.of(parts, dtype)
    got, expected = format.multiply(rows, None), rows @ whole.T
    assert got.dtype == dtype
    torch.testing.assert_close(got, expected)
    is_narrow = torch.bfloat16 in (stored, dtype)
    assert format.panels.dtype == (torch.bfloat16 if is_narrow else torch.float32)
    is_paired = dtype == torch.bfloat16 and has_pairs()
    assert format.panels.dim() == (4 if is_paired else 3)


def test_panels_are_bf16_only_if_that_is_exact(needs_a_compiler):
    exact = make_parts(dtype=torch.bfloat16)
    widened = [part.float() for part in exact]
    assert Panels.of(widened, torch.float32).panels.dtype == torch.bfloat16
    widened[2][-1, -1] = 1 + 2**-12
    assert Panels.of(widened, torch.float32).panels.dtype == torch.float32


def test_dense_parts_are_concatenated_in_the_compute_dtype():
    parts = make_parts(dtype=torch.bfloat16)
    format = Dense.of(parts, CPU, torch.float32)
    assert torch.equal(format.weight, torch.cat(parts).float())
    assert format.num_bytes == format.weight.nbytes == 55 * 24 * 4


def test_the_format_depends_on_device_and_dtype(monkeypatch):
    for is_fast in (True, False):
        monkeypatch.setattr(linear.cpu_linear, "is_faster", lambda is_fast=is_fast: is_fast)
        assert linear.uses_panels(CPU, torch.float32) is is_fast
        assert not linear.uses_panels(CPU, torch.float16)
        assert not linear.uses_panels(torch.device("cuda"), torch.bfloat16)
    assert isinstance(choose_format(CPU, torch.float32)(make_parts()), Dense)


def test_panels_are_used_on_cpus_where_they_are_faster(monkeypatch):
    fast = ("avx512bf16", "avx512vnni", "avx512", "avxvnni", "avx2")
    for name, expected in (*((name, True) for name in fast), ("neon", False)):
        target = Target(name, (), ())
        monkeypatch.setattr("kernels.cpu.linear.load_library", lambda: None)
        monkeypatch.setattr("kernels.cpu.linear.host_target", lambda target=target: target)
        assert is_faster() is expected


def test_attached_functions_add_to_each_product():
    (weight,) = make_parts((6,))
    layer = Linear(Dense(weight), torch.ones(6), {"q": Part(slice(0, 6))}, 24, torch.float32)
    rows = torch.randn(3, 24)
    plain = layer(rows)
    torch.testing.assert_close(plain, rows @ weight.T + 1)
    layer.attach(lambda rows, outputs: outputs.add_(rows[:, :6]))
    torch.testing.assert_close(layer(rows), plain + rows[:, :6])
