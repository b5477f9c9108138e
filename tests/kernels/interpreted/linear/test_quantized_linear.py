"""quantized_linear in Triton's interpreter, against the dequantized weight in fp64."""

from __future__ import annotations

import pytest
import torch

from engine.model.quantization.at_load import QUANTIZERS, quantize_weight
from engine.model.quantization.formats import Dequantizing, TritonCodes
from engine.model.quantization.weights import Float4Weight, Float8Weight, IntegerWeight
from kernels.launch_plan import planned
from kernels.linear import quantized_linear as quantized_module
from kernels.linear.quantized_linear import PER_BYTE, block_size, pack_pairs, quantized_linear
from tests.kernels.elementwise_inputs import strided
from tests.kernels.quantized_inputs import make_codes

TOLERANCE = {torch.float16: 2**-10, torch.bfloat16: 2**-7}


def make(kind, num_outputs, num_inputs, group_size):
    """Return codes, scales, zeros and the dequantized weight in fp64."""
    return make_codes(kind, (num_outputs, num_inputs), group_size)


def check(rows, made, kind, group_size, bias=None):
    codes, scales, zeros, weight = made
    got = quantized_linear(rows, codes, scales, zeros, bias, kind, group_size)
    assert got.dtype == rows.dtype
    exact = rows.double() @ weight.T
    if bias is not None:
        exact += bias.double()
    magnitude = rows.double().abs() @ weight.abs().T
    limit = TOLERANCE[rows.dtype] * exact.abs() + 2**-20 * magnitude + 1e-7
    assert got.isfinite().all()
    assert ((got.double() - exact).abs() <= limit).all()


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", PER_BYTE)
@pytest.mark.parametrize(
    ("num_inputs", "group_size"), [(64, 32), (192, 192), (128, 64), (256, 128), (256, 256)]
)
def test_groups(kind, dtype, num_inputs, group_size):
    """Inputs are in blocks of 32 or 64. A group has one block, several, or all blocks of a row."""
    rows = strided(5, num_inputs, dtype=dtype, seed=1)
    check(rows, make(kind, 40, num_inputs, group_size), kind, group_size)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", PER_BYTE)
@pytest.mark.parametrize("num_rows", [1, 16, 17, 33, 70])
def test_tiles_of_rows(kind, num_rows):
    rows = strided(num_rows, 128, dtype=torch.bfloat16, seed=2)
    check(rows, make(kind, 150, 128, 64), kind, 64)


@pytest.mark.parametrize("kind", PER_BYTE)
@pytest.mark.parametrize(("num_rows", "num_tiles"), [(1, 1), (33, 2)])
def test_splits_of_the_inputs(kind, num_rows, num_tiles, monkeypatch):
    """The last split is shorter, and splits begin within a group."""
    module = "kernels.linear.quantized_linear"
    monkeypatch.setattr(f"{module}.MIN_STEPS", 1)
    monkeypatch.setattr(f"{module}.WARPS", 5 * 4 * num_tiles)
    monkeypatch.setattr(f"{module}.ADDED", 32)
    monkeypatch.setattr(f"{module}.SPLITS_AT_ONCE", 2)
    monkeypatch.setattr(f"{module}._plan", planned(quantized_module._plan.__wrapped__))
    rows, made = strided(num_rows, 1152, dtype=torch.bfloat16, seed=4), make(kind, 66, 1152, 384)
    plan = quantized_module._plan(rows, *made[:3], None, kind, 384, False)
    assert plan.grid == (num_tiles, 5)
    check(rows, made, kind, 384, torch.randn(66))


@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16])
def test_a_bias_is_added_before_rounding(bias_dtype):
    rows = strided(3, 128, dtype=torch.bfloat16, seed=3)
    check(rows, make("int4", 48, 128, 32), "int4", 32, torch.randn(48).to(bias_dtype))


def test_no_rows():
    codes, scales, zeros, _ = make("int8", 8, 64, 64)
    rows = torch.empty(0, 64, dtype=torch.bfloat16)
    assert quantized_linear(rows, codes, scales, zeros, None, "int8", 64).shape == (0, 8)


def test_block_sizes():
    assert [block_size("int4", 256, group) for group in (16, 32, 64, 128, 256)] == [
        None, 32, 64, 64, 64,
    ]  # fmt: skip
    assert block_size("int4", 96, 96) is None, "96 inputs are 3 blocks, and int4 takes 2 at a time"
    assert block_size("int8", 96, 96) == 32
    with pytest.raises(ValueError, match="no kernel for 4-bit"):
        pack_pairs(torch.zeros(4, 32, dtype=torch.uint8), 16)


EXPERTS = {"codes": torch.zeros(3, 8, 64).byte(), "scales": torch.ones(3, 1, 8), "zeros": None}
"""Codes and scales for `grouped_quantized_linear`."""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": torch.zeros(2, 64)}, "rows are torch.float32"),
        ({"rows": torch.zeros(64, 2).half().T}, "contiguous"),
        ({"rows": torch.zeros(2, 128).half()}, "do not fit"),
        ({"scales": torch.zeros(2, 8)}, "do not fit"),
        ({"zeros": None}, "zeros must have the shape.*got None"),
        ({"zeros": torch.zeros(2, 8, dtype=torch.uint8)}, r"zeros must have the shape.*2, 8"),
        ({"zeros": torch.zeros(1, 8)}, "zeros must .*be uint8.*torch.float32"),
        ({"kind": "fp8"}, "None for fp8"),
        ({"bias": torch.zeros(7)}, r"bias is \[7\]"),
        ({"bias": torch.zeros(8, dtype=torch.int32)}, r"bias is \[8\] torch.int32"),
        ({"bias": torch.zeros(16)[::2]}, "bias must be contiguous"),
        ({"group_size": 16}, "no kernel for int8 with 64 inputs in groups of 16"),
        ({"rows": torch.zeros(64).half()}, "they must be"),
        (EXPERTS | {"kind": "fp8"}, "they must be"),
    ],
)
def test_invalid_inputs(change, message):
    codes, scales, zeros, _ = make("int8", 8, 64, 64)
    given = {"rows": torch.zeros(2, 64).half(), "codes": codes, "scales": scales, "zeros": zeros,
             "bias": None, "kind": "int8", "group_size": 64} | change  # fmt: skip
    with pytest.raises(ValueError, match=message):
        quantized_linear(**given)


@pytest.mark.parametrize("precision", QUANTIZERS)
def test_the_format_equals_the_reference(precision):
    weight = quantize_weight(torch.randn(40, 256), precision, torch.device("cpu"))
    assert isinstance(weight, IntegerWeight | Float8Weight)
    rows, bias = torch.randn(7, 256).half(), torch.randn(40).half()
    expected = Dequantizing(weight).multiply(rows.float(), bias.float())
    got = TritonCodes(weight).multiply(rows, bias)
    torch.testing.assert_close(got.float(), expected, atol=2e-2, rtol=2e-3)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_all_codes_of_mxfp4_are_exact(dtype):
    """The exponents are some of those that the result's dtype can hold; in bf16 also the least,
    2**-127."""
    exponents = torch.tensor([0, 1, 100, 127, 200, 250] if dtype == torch.bfloat16 else [117, 130])
    codes = torch.arange(16, dtype=torch.uint8).repeat(len(exponents), 4)
    neighbours = codes[:, ::2] | codes[:, 1::2] << 4
    weight = Float4Weight(neighbours, exponents.to(torch.uint8)[:, None].expand(-1, 2))
    got = TritonCodes(weight).multiply(torch.eye(64, dtype=dtype), None)
    assert torch.equal(got.T.float(), weight.dequantized())
