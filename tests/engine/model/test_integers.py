"""The CPU's format for integer weights, compared with the dequantized weight."""

from __future__ import annotations

import pytest
import torch

from engine.model.linear import Panels
from engine.model.quantization.formats import Dequantizing, quantized_format
from engine.model.quantization.integers import Integers
from engine.model.quantization.weights import IntegerWeight
from kernels.cpu.integers import rounds_rows
from kernels.cpu.shared_library import unavailable_reason

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _needs_a_compiler():
    reason = unavailable_reason()
    if reason is not None:
        pytest.skip(reason)


def make_weight(bits, group_size):
    generator = torch.Generator().manual_seed(bits + group_size)
    codes, zeros = (
        torch.randint(2**bits, size, generator=generator, dtype=torch.uint8)
        for size in ((70, 256), (70, 256 // group_size))
    )
    return IntegerWeight(codes, torch.rand(zeros.shape), zeros, bits, group_size)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [32, 64, 128, 256])
def test_products_are_those_of_the_dequantized_weight(bits, group_size):
    weight = make_weight(bits, group_size)
    rows, bias = torch.randn(9, 256), torch.randn(70)
    expected = rows @ weight.dequantized().T + bias
    exact = Integers.of(weight, is_exact=True)
    torch.testing.assert_close(exact.multiply(rows, bias), expected, atol=1e-3, rtol=1e-5)
    fast = Integers.of(weight)
    assert fast.is_rounded == rounds_rows()
    assert (fast.multiply(rows, bias) - expected).norm() < 0.012 * expected.norm()


def test_where_integers_are_used(monkeypatch):
    codes, zeros = (torch.zeros(size, dtype=torch.uint8) for size in ((8, 24), (8, 2)))
    odd = IntegerWeight(codes, torch.ones(8, 2), zeros, bits=4, group_size=12)
    for is_fast in (True, False):
        monkeypatch.setattr("kernels.cpu.linear.is_faster", lambda is_fast=is_fast: is_fast)
        kind = Integers if is_fast else Dequantizing
        for dtype in (torch.float32, torch.bfloat16):
            assert type(quantized_format(make_weight(4, 64), CPU, dtype)) is kind
        assert type(quantized_format(make_weight(4, 64), CPU, torch.float16)) is Dequantizing
        kind = Panels if is_fast else Dequantizing
        assert type(quantized_format(odd, CPU, torch.float32)) is kind


def test_bytes_per_weight():
    size = 128 * 256  # more than whole panels need: 70 outputs become 96 or 80
    assert 70 * 256 < Integers.of(make_weight(8, 256)).num_bytes < 1.05 * size
    assert 35 * 256 < Integers.of(make_weight(4, 128)).num_bytes < 0.54 * size
