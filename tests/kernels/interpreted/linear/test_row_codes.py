"""Rows in fp8 with a scale for each row, and weights dequantized for products of many rows."""

from __future__ import annotations

import pytest
import torch

from engine.model.quantization.at_load import quantize_weight
from engine.model.quantization.formats import Dequantizing, ScaledFloat8, TritonCodes
from engine.model.quantization.weights import Float8Weight, IntegerWeight
from kernels.linear import row_codes
from kernels.linear.dequantize import dequantize
from tests.kernels.interpreted.linear.test_quantized_linear import make

BF16 = torch.bfloat16
CPU = torch.device("cpu")


def test_codes_equal_torchs(monkeypatch):
    """Rows have very different magnitudes, one is all zeros, and rows take two blocks."""
    monkeypatch.setattr(row_codes, "MAX_BLOCK", 64)
    rows = magnitudes(96).repeat(1, 2)[:, :96]
    codes, scales = row_codes.row_codes(rows)
    expected = rows.abs().amax(1, keepdim=True).float().clamp(min=1e-12) / 448
    assert torch.equal(scales, expected)
    rounded = (rows / expected).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(codes.view(torch.uint8), rounded.view(torch.uint8))


def test_columns_must_be_contiguous():
    with pytest.raises(ValueError, match="the last must be 1"):
        row_codes.row_codes(torch.zeros(4, 8).T)


@pytest.mark.parametrize("bias", [None, torch.ones(32, dtype=BF16)])
def test_fp8_products_scale_each_row(bias):
    """torch runs this product on CPUs, too."""
    weight = quantize_weight(torch.randn(32, 128), "fp8", CPU)
    assert isinstance(weight, Float8Weight)
    rows = magnitudes(128).repeat(17, 1)
    got = ScaledFloat8(weight).multiply(rows, bias)
    expected = Dequantizing(weight).multiply(rows, bias)
    error = (got - expected).float().norm(dim=1) / expected.float().norm(dim=1).clamp(min=1e-9)
    assert got.dtype == BF16
    assert (error < 0.05).all()


@pytest.mark.parametrize(("kind", "group"), [("int4", 128), ("int4", 32), ("int8", 256),
                                             ("fp8", 64), ("fp4", 32)])  # fmt: skip
def test_dequantized_weights_are_rounded_once(kind, group):
    codes, scales, zeros, dense = make(kind, 70, 256, group)
    got = dequantize(codes, scales, zeros, kind, group, torch.float16)
    assert torch.equal(got, dense.to(torch.float16))


@pytest.mark.parametrize("num_rows", [2, 3])
def test_many_rows_are_multiplied_by_dequantized_weights(num_rows, monkeypatch):
    weight = quantize_weight(torch.randn(40, 256), "int4", CPU)
    assert isinstance(weight, IntegerWeight)
    format = TritonCodes(weight)
    format.max_rows, products = 2, []
    monkeypatch.setattr(format, "product", lambda *arguments: products.append(1))
    rows, bias = torch.randn(num_rows, 256).half(), torch.randn(40)
    got = format.multiply(rows, bias)
    assert (got is None) == (num_rows == 2) == bool(products)
    if got is not None:
        expected = Dequantizing(weight).multiply(rows.float(), bias)
        torch.testing.assert_close(got.float(), expected, atol=2e-2, rtol=2e-3)


def magnitudes(width):
    rows = torch.randn(4, width, generator=torch.Generator().manual_seed(2)).to(BF16)
    return rows * torch.tensor([[1e-3], [1.0], [1e3], [0.0]], dtype=BF16)
