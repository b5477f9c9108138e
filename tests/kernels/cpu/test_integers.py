"""Products with integer weights against fp64, on every target that this CPU supports."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.cpu.integers import integer_linear, rounds_rows, to_integer_panels

BLOCK_ROWS, BLOCK_DEPTH = 96, 256
"""As in linear.h and integers.cpp."""
BITS = [4, 8]
SHAPES = [(1, 40, 50), (5, 33, 100), (7, 31, 72), (13, 65, 800), (50, 16, 768), (200, 130, 264)]
"""(rows, outputs, inputs)"""


def make(num_columns, depth, group, bits, zero=None):
    """Return the panels of a random weight, and that weight in fp64. zero: of all groups.

    Weights with groups of 24, 32 and 200 have minimums.
    """
    generator = torch.Generator().manual_seed(num_columns + depth + group)
    size = num_columns, -(-depth // group)
    codes = torch.randint(2**bits, (num_columns, depth), generator=generator, dtype=torch.uint8)
    zeros = torch.randint(2**bits, size, generator=generator, dtype=torch.uint8)
    if zero is not None:
        zeros.fill_(zero)
    scales = torch.rand(size, generator=generator) + 0.1
    groups = torch.arange(depth) // group
    weight = (codes.double() - zeros[:, groups].double()) * scales[:, groups].double()
    if group not in (24, 32, 200):
        return to_integer_panels(codes, scales, zeros, bits, group), weight
    minimums = torch.rand(size, generator=generator) * 2**bits
    panels = to_integer_panels(codes, scales, zeros, bits, group, minimums)
    return panels, weight - minimums[:, groups].double()


def normal(*size):
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size)))


def groups_of(depth):
    return [group for group in (8, 24, 32, 64, 128, 200) if group < depth] + [depth]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", SHAPES)
def test_exact_products(target, bits, shape):
    num_rows, num_columns, depth = shape
    rows, bias = normal(num_rows, depth), normal(num_columns)
    for group in groups_of(depth):
        panels, weight = make(num_columns, depth, group, bits)
        expected = rows.double() @ weight.T + bias.double()
        got = integer_linear(rows, panels, bias)
        assert (got - expected).abs().max() <= 1e-6 * depth**0.5 * expected.abs().max()
        low = rows.bfloat16()
        error = (integer_linear(low, panels).double() - low.double() @ weight.T).abs()
        assert (error <= 2**-8 * expected.abs().max()).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", SHAPES)
def test_rounded_rows_change_products_within_the_bound(target, bits, shape):
    if not rounds_rows():
        pytest.skip("the target does not round rows")
    bits_of_rows = 16 if target.name == "avx2" else 8
    num_rows, num_columns, depth = shape
    rows = normal(num_rows, depth) * torch.logspace(-2, 2, depth)
    for group in groups_of(depth):
        panels, weight = make(num_columns, depth, group, bits)
        exact = rows.double() @ weight.T
        error = (integer_linear(rows, panels, is_rounded=True) - exact).abs()
        bound = torch.zeros_like(exact)
        for part in torch.arange(depth).split(row_group(group, depth, bits_of_rows)):
            bound += (
                rows[:, part].abs().amax(1, keepdim=True)
                / (2**bits_of_rows - 2)  # half a step: the largest becomes 127 or 32767
                @ weight[:, part].abs().sum(1, keepdim=True).T.float()
            )
        assert (error <= bound * 1.001 + 1e-6 * exact.abs().max()).all()
        assert error.norm() <= (0.012 if bits_of_rows == 8 else 1e-4) * exact.norm()
        low = integer_linear(rows.bfloat16(), panels, is_rounded=True)
        assert (low - exact).norm() <= 0.016 * exact.norm()


def row_group(group, depth, bits_of_rows):
    most = 8 * bits_of_rows
    return most if group >= depth else math.gcd(group, most)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("depth", "zero"),
    [(2 * BLOCK_DEPTH + 40, None), (2 * BLOCK_DEPTH, None), (2 * BLOCK_DEPTH, 128)],
)
def test_a_row_has_the_same_bits_in_any_batch_and_with_any_number_of_threads(
    target, bits, dtype, depth, zero
):
    """AMX multiplies whole groups of many rows, if codes minus zeros fit into signed bytes."""
    panels, _ = make(150, depth, 64, bits, zero and zero >> (8 - bits))
    rows = normal(2 * BLOCK_ROWS + 3, panels.depth).to(dtype)
    num_threads = torch.get_num_threads()
    for is_rounded in {False, rounds_rows()}:
        whole = integer_linear(rows, panels, is_rounded=is_rounded)
        for start, end in ((0, 1), (3, 5), (50, 131), (90, 97)):
            part = integer_linear(rows[start:end], panels, is_rounded=is_rounded)
            assert torch.equal(part, whole[start:end])
        try:
            torch.set_num_threads(3)
            assert torch.equal(integer_linear(rows, panels, is_rounded=is_rounded), whole)
        finally:
            torch.set_num_threads(num_threads)


def test_rows_that_cannot_be_rounded(target):
    """A row with NaN or infinity becomes NaN, a row of zeros stays zero, and other rows keep their
    results."""
    if not rounds_rows():
        pytest.skip("the target does not round rows")
    panels, _ = make(40, 200, 40, 8)
    rows = normal(5, 200)
    expected = integer_linear(rows, panels, is_rounded=True)
    rows[1, 7], rows[2, 199], rows[3] = float("nan"), -float("inf"), 0
    got = integer_linear(rows, panels, is_rounded=True)
    assert got[1:3].isnan().all()
    assert not got[3].any()
    assert torch.equal(got[[0, 4]], expected[[0, 4]])
    tiny = integer_linear(torch.full((1, 200), 1e-42), panels, is_rounded=True)
    assert tiny.abs().max() < 1e-30


def test_rows_of_any_shape_and_stride():
    panels, weight = make(20, 32, 16, 4)
    rows = normal(24, 32)
    expected = (rows.double() @ weight.T).float()
    shaped = integer_linear(rows.view(2, 12, 32), panels).view(24, 20)
    for got in (shaped, integer_linear(rows.T.contiguous().T, panels)):
        torch.testing.assert_close(got, expected)
    torch.testing.assert_close(integer_linear(rows[::2], panels), expected[::2])
    assert integer_linear(rows[:0], panels).shape == (0, 20)


def test_panels_take_as_many_bytes_as_their_codes_and_groups():
    for bits, code_bytes in ((4, 64 * 128 / 2), (8, 64 * 128)):
        panels, _ = make(64, 128, 64, bits)
        # Each of 64 columns has 2 groups, with a scale of 4 bytes and a zero point of 1 byte.
        assert panels.nbytes == code_bytes + 64 * 2 * (4 + 1)


def test_wrong_rows_are_rejected():
    panels, _ = make(20, 32, 16, 4)
    rows, bias = normal(3, 32), normal(20)
    wrong = [
        (rows[:, :31], None),
        (rows.double(), None),
        (rows, bias[:19]),
        (rows, bias.bfloat16()),
        (rows, normal(40)[::2]),
    ]
    for arguments in wrong:
        with pytest.raises(ValueError, match=r"do not match a weight \[20, 32\]"):
            integer_linear(arguments[0], panels, arguments[1])


def test_rounding_needs_products_of_integers(monkeypatch):
    panels, _ = make(20, 32, 16, 4)
    monkeypatch.setattr("kernels.cpu.integers.rounds_rows", lambda: False)
    with pytest.raises(ValueError, match="leave the rows as they are"):
        integer_linear(normal(3, 32), panels, is_rounded=True)


@pytest.mark.parametrize("change", ["scales", "zeros", "bits", "group", "dtype", "codes", "low"])
def test_wrong_weights_are_rejected(change):
    groups = 20, 2
    codes, zeros = torch.full((20, 32), 3, dtype=torch.uint8), torch.ones(groups, dtype=torch.uint8)
    scales, minimums, bits, group = torch.ones(groups), torch.ones(groups), 4, 16
    to_integer_panels(codes, scales, zeros, bits, group, minimums)
    match change:
        case "scales":
            scales = torch.ones(20, 3)
        case "zeros":
            zeros = zeros[:19]
        case "bits":
            bits = 5
        case "group":
            scales, zeros, group = scales[:, :1].expand(20, 3), zeros[:, :1].expand(20, 3), 12
        case "dtype":
            codes = codes.to(torch.int8)
        case "codes":
            codes[7, 5] = 16
        case "low":
            minimums = minimums[:, :1]
    with pytest.raises(ValueError, match="do not match"):
        to_integer_panels(codes, scales, zeros, bits, group, minimums)
