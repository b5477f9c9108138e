"""Pinned products in Triton's interpreter: the bits of a row do not depend on the other rows."""

from __future__ import annotations

import pytest
import torch

from engine.lora.memory import AdapterMemory
from engine.model.linear import Dense, Linear, Part
from kernels.linear.grouped_linear import grouped_linear
from kernels.linear.grouped_quantized_linear import grouped_quantized_linear
from kernels.linear.pinned_linear import pinned_linear
from kernels.linear.quantized_linear import PER_BYTE, quantized_linear
from tests.kernels.elementwise_inputs import strided
from tests.kernels.quantized_inputs import make_codes

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, FP16, FP32)
TOLERANCE = {FP32: 2**-19, FP16: 2**-10, BF16: 2**-7}
NUM_ROWS = 150
COUNTS = ([150, 0, 0], [1, 100, 49], [0, 33, 117], [64, 65, 21])
"""Rows of each expert."""


def check_bits(multiply, rows):
    """Compare runs of rows with all rows at once: one row, as a decode, and chunks of odd sizes."""
    expected = multiply(rows)
    for start, size in ((0, 1), (149, 1), (70, 1), (3, 17), (5, 64), (20, 65), (0, 129)):
        got = multiply(rows[start : start + size])
        assert torch.equal(got, expected[start : start + size]), (start, size)


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(256, 200), (720, 48), (100, 130)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_rows_of_a_weight(num_inputs, num_outputs, dtype, has_bias):
    rows = strided(NUM_ROWS, num_inputs, dtype=dtype)
    weight = strided(num_outputs, num_inputs, dtype=dtype, seed=1)
    bias = torch.randn(num_outputs).to(dtype) if has_bias else None
    check_bits(lambda some: pinned_linear(some, weight, bias), rows)
    exact = rows.double() @ weight.double().T + (0 if bias is None else bias.double())
    magnitude = rows.double().abs() @ weight.double().abs().T
    limit = TOLERANCE[dtype] * exact.abs() + 2**-20 * magnitude + 1e-7
    assert ((pinned_linear(rows, weight, bias).double() - exact).abs() <= limit).all()


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_rows_of_an_expert(dtype, counts):
    """They have the bits of the same rows multiplied by the expert's weight alone."""
    rows = strided(NUM_ROWS, 192, dtype=dtype)
    weights = strided(3 * 80, 192, dtype=dtype, seed=1).unflatten(0, (3, 80))
    got = grouped_linear(rows, weights, torch.tensor(counts).cumsum(0).int(), is_pinned=True)
    expected = [
        pinned_linear(part, weight, None)
        for part, weight in zip(rows.split(counts), weights, strict=True)
    ]
    assert torch.equal(got, torch.cat(expected))


@pytest.mark.matrix
@pytest.mark.parametrize("kind", PER_BYTE)
def test_rows_of_a_quantized_weight(kind):
    codes, scales, zeros, _ = make_codes(kind, (72, 256), 64)

    def multiply(rows):
        return quantized_linear(rows, codes, scales, zeros, None, kind, 64, is_pinned=True)

    check_bits(multiply, strided(NUM_ROWS, 256, dtype=BF16))


@pytest.mark.matrix
@pytest.mark.parametrize("kind", PER_BYTE)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_rows_of_a_quantized_expert(kind, counts):
    codes, scales, zeros, _ = make_codes(kind, (3, 40, 128), 64)
    rows = strided(NUM_ROWS, 128, dtype=BF16)
    ends = torch.tensor(counts).cumsum(0).int()
    got = grouped_quantized_linear(rows, codes, scales, zeros, ends, kind, 64, is_pinned=True)
    for expert, end in enumerate(ends.tolist()):
        own_zeros = None if zeros is None else zeros[expert]
        for row in range(end - counts[expert], end, 30):
            alone = quantized_linear(
                rows[row : row + 1], codes[expert], scales[expert], own_zeros, None, kind, 64,
                is_pinned=True,
            )  # fmt: skip
            assert torch.equal(got[row : row + 1], alone)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_adapters(dtype):
    """A token's adapter adds the same bits, alone or among tokens with other adapters."""
    torch.manual_seed(0)
    part = Part(slice(0, 80))
    linear = Linear(Dense(torch.zeros(80, 64, dtype=dtype)), None, {"layer": part}, 64, dtype)
    memory = AdapterMemory([linear], 2, 16, torch.device("cpu"), is_pinned=True)
    (factors,) = memory.factors
    for weight in (factors.down, factors.up["layer"]):
        weight.copy_(torch.randn(weight.shape))
    rows = strided(70, 64, dtype=dtype)
    slots = torch.arange(70) % 3 - 1
    memory.choose(slots)
    together = linear(rows)
    exact = rows.double() @ factors.down.double().T
    exact = (exact * (slots[:, None] == torch.arange(32) // 16)) @ factors.up["layer"].double()
    torch.testing.assert_close(
        together.double(), exact, atol=0.5 if dtype == BF16 else 1e-3, rtol=0.1
    )
    for start, end in ((0, 1), (7, 8), (3, 69)):
        memory.choose(slots[start:end])
        assert torch.equal(linear(rows[start:end]), together[start:end])


def test_empty_results():
    assert pinned_linear(torch.zeros(0, 16), torch.zeros(8, 16), None).shape == (0, 8)
    assert pinned_linear(torch.zeros(4, 16), torch.zeros(0, 16), None).shape == (4, 0)


ROWS, WEIGHT, BIAS = torch.zeros(4, 16), torch.zeros(8, 16), torch.zeros(8)


@pytest.mark.parametrize(
    ("rows", "weight", "bias", "message"),
    [
        (ROWS[0], WEIGHT, BIAS, "they must be"),
        (ROWS[:, :8], WEIGHT, BIAS, "they must be"),
        (torch.zeros(16, 4).T, WEIGHT, BIAS, "K contiguous"),
        (ROWS.double(), WEIGHT.double(), BIAS, "bf16, fp16 or fp32"),
        (ROWS.bfloat16(), WEIGHT, BIAS, "but the weight is"),
        (ROWS, WEIGHT, BIAS[:4], "bias is"),
        (ROWS, WEIGHT, torch.zeros(16)[::2], "bias is"),
    ],
)
def test_invalid_inputs(rows, weight, bias, message):
    with pytest.raises(ValueError, match=message):
        pinned_linear(rows, weight, bias)
