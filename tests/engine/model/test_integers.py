"""The CPU's format for integer weights beside the dequantized weight."""

from __future__ import annotations

import pytest
import torch

from engine.model.integers import Integers
from engine.model.quantized import IntegerWeight
from kernels.cpu.integers import rounds_rows
from kernels.cpu.shared_library import unavailable_reason


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


def test_bytes_per_weight():
    size = 128 * 256  # 70 outputs become whole panels of 32, or of 16
    assert 70 * 256 < Integers.of(make_weight(8, 256)).num_bytes < 1.05 * size
    assert 35 * 256 < Integers.of(make_weight(4, 128)).num_bytes < 0.54 * size
