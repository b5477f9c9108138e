"""grouped_linear in Triton's interpreter, against a loop over experts in fp64."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from kernels.linear.grouped_linear import grouped_linear
from tests.kernels.elementwise_inputs import strided

TOLERANCE = {torch.float32: 2**-19, torch.float16: 2**-10, torch.bfloat16: 2**-7}
"""Maximum error relative to each number: two roundings to fp16 or bf16, or 32 to fp32. `check` adds
a margin for sums that cancel."""
DTYPES = list(TOLERANCE)
BF16 = torch.bfloat16


def make(counts, num_inputs, num_outputs, dtype, seed=0):
    """Return strided rows and strided weights, with NaN in the gaps."""
    rows = strided(sum(counts), num_inputs, dtype=dtype, seed=seed)
    weights = strided(len(counts) * num_outputs, num_inputs, dtype=dtype, seed=seed + 1)
    weights = weights.unflatten(0, (len(counts), num_outputs))
    return rows, weights, torch.tensor(counts).cumsum(0).int()


def check(rows, weights, ends):
    got = grouped_linear(rows, weights, ends)
    assert got.dtype == rows.dtype
    assert got.is_contiguous()
    exact = torch.empty(got.shape, dtype=torch.float64)
    magnitude = torch.empty_like(exact)
    starts = [0, *ends.tolist()]
    for expert, matrix in enumerate(weights.double()):
        its_rows = slice(starts[expert], starts[expert + 1])
        exact[its_rows] = rows[its_rows].double() @ matrix.T
        magnitude[its_rows] = rows[its_rows].double().abs() @ matrix.abs().T
    assert got.isfinite().all()
    limit = TOLERANCE[rows.dtype] * exact.abs() + 2**-20 * magnitude + 1e-7
    assert ((got.double() - exact).abs() <= limit).all()


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_inputs", "num_outputs"), [(64, 64), (128, 80), (100, 130), (72, 1), (1, 48), (16, 200)]
)
def test_widths(num_inputs, num_outputs, dtype):
    check(*make([3, 0, 17, 1], num_inputs, num_outputs, dtype))


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "counts",
    [
        [1],
        [130],
        [0, 0, 1],
        [1, 0, 0],
        [0, 40, 0],  # all rows with the same expert
        [16, 16, 16],
        [17, 0, 15, 16],
        [90, 1, 1],
        [1] * 5,
        [200, 57, 129],
        [300, 400, 129],
    ],
)
def test_numbers_of_rows_per_expert(counts, dtype):
    check(*make(counts, 64, 48, dtype))


def test_the_greatest_number_of_tiles():
    """Every expert's last tile holds one row."""
    for height in (16, 32, 64, 128):
        check(*make([1, 2 * height + 1, 1], 32, 16, BF16))


@pytest.mark.parametrize("num_experts", [1, 2, 60, 128, 256])
def test_uneven_numbers_of_rows(num_experts):
    rng = random.Random(num_experts)
    for num_rows in (1, 8, 3 * num_experts):
        counts = [0] * num_experts
        for _ in range(num_rows):
            counts[min(int(rng.expovariate(8 / num_experts)), num_experts - 1)] += 1
        check(*make(counts, 32, 20, BF16))


def test_several_groups_of_tiles():
    """The grid has room for 15 row tiles, which is not a multiple of GROUP (8)."""
    check(*make([20] * 8 + [0, 180], 64, 200, torch.float16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_dense_and_overlapping_rows(dtype):
    rows, weights, ends = make([5, 0, 20], 48, 33, dtype)
    check(rows.contiguous(), weights.contiguous(), ends)
    check(rows[:1].expand(25, -1), weights[:1].expand(3, -1, -1), ends)


@pytest.mark.parametrize("counts", [[5, 0, 20], [0, 0, 1], [70, 3, 2]])
def test_equals_torchs_grouped_mm(counts):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(counts), 64, generator=generator)
    weights = torch.randn(len(counts), 48, 64, generator=generator)
    ends = torch.tensor(counts).cumsum(0).int()
    expected = F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)
    torch.testing.assert_close(grouped_linear(rows, weights, ends), expected, atol=1e-4, rtol=1e-5)


def test_empty_results():
    weights, ends = torch.zeros(3, 8, 16), torch.zeros(3, dtype=torch.int32)
    assert grouped_linear(torch.zeros(0, 16), weights, ends).shape == (0, 8)
    assert grouped_linear(torch.zeros(4, 16), weights[:, :0], ends + 4).shape == (4, 0)


ROWS, WEIGHTS, ENDS = torch.zeros(4, 16), torch.zeros(3, 8, 16), torch.full((3,), 4).int()


@pytest.mark.parametrize(
    ("rows", "weights", "ends", "message"),
    [
        (ROWS[0], WEIGHTS, ENDS, "they must be"),
        (ROWS, WEIGHTS[0], ENDS, "they must be"),
        (ROWS[:, :8], WEIGHTS, ENDS, "they must be"),
        (ROWS, WEIGHTS, ENDS[:2], "they must be"),
        (ROWS, WEIGHTS, ENDS[:, None], "they must be"),
        (ROWS, WEIGHTS[:0], ENDS[:0], "E at least 1"),
        (torch.zeros(16, 4).T, WEIGHTS, ENDS, "contiguous"),
        (ROWS, torch.zeros(3, 16, 8).transpose(1, 2), ENDS, "contiguous"),
        (ROWS, WEIGHTS, torch.zeros(6).int()[::2], "contiguous"),
        (ROWS.bfloat16(), WEIGHTS, ENDS, "of one type"),
        (ROWS.double(), WEIGHTS.double(), ENDS, "of one type"),
        (ROWS, WEIGHTS, ENDS.long(), "ends int32"),
    ],
)
def test_invalid_inputs(rows, weights, ends, message):
    with pytest.raises(ValueError, match=message):
        grouped_linear(rows, weights, ends)
