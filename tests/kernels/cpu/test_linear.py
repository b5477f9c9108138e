"""Products with panel weights against fp64, at all edges of tiles, panels and blocks."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from kernels.cpu.calls import run
from kernels.cpu.elementwise import ACTIVATIONS
from kernels.cpu.linear import has_pairs, linear, panel_columns, product
from tests.kernels.cpu.panels import to_pairs, to_panels

BLOCK_ROWS, BLOCK_DEPTH, TILE_ROWS = 96, 768, 12
"""As in linear.h, linear.cpp and tiles.h, where TILE_ROWS is smaller for CPUs without AVX-512."""
needs_pairs = pytest.mark.skipif(not has_pairs(), reason="the CPU does not multiply pairs of bf16")


def from_panels(panels, num_columns):
    """Return the weight [num_columns, in] that `to_panels` or `to_pairs` took."""
    if panels.dim() == 4:
        panels = panels.transpose(2, 3).flatten(1, 2)
    return panels.transpose(1, 2).reshape(-1, panels.shape[1])[:num_columns]


def make(num_rows, num_columns, depth):
    generator = torch.Generator().manual_seed(num_rows * depth + num_columns)
    sizes = (num_rows, depth), (num_columns, depth), (num_columns,)
    return [torch.randn(*size, generator=generator) for size in sizes]


@pytest.fixture(params=["fp32", "bf16", "bf16 rows", pytest.param("pairs", marks=needs_pairs)])
def check(request):
    if request.param in DTYPES:
        return partial(check_panels_of, DTYPES[request.param])
    return partial(check_bf16_rows, to_pairs if request.param == "pairs" else to_panels)


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def check_panels_of(dtype, num_rows, num_columns, depth, with_bias=True):
    """Check fp32 rows with a weight in `dtype`. The expected product is that of the rounded weight,
    so both dtypes must be equally exact."""
    rows, weight, bias = make(num_rows, num_columns, depth)
    weight = weight.to(dtype).float()
    panels = to_panels(weight.to(dtype))
    assert panels.dtype == dtype
    got = linear(rows, panels, num_columns, bias if with_bias else None)
    expected = rows.double() @ weight.double().T + (bias.double() if with_bias else 0)
    assert got.shape == expected.shape
    assert (got - expected).abs().max() <= 1e-6 * depth**0.5 * expected.abs().max()


def check_bf16_rows(pack, num_rows, num_columns, depth, with_bias=True):
    """Check rows and panels in bf16. The result is rounded once, at the end."""
    depth += depth % 2
    rows, weight, bias = make(num_rows, num_columns, depth)
    rows, weight = rows.bfloat16(), weight.bfloat16()
    got = linear(rows, pack(weight), num_columns, bias if with_bias else None)
    expected = rows.double() @ weight.double().T + (bias.double() if with_bias else 0)
    assert (got.shape, got.dtype) == (expected.shape, torch.bfloat16)
    error = (got.double() - expected).abs()
    assert (error <= 2**-8 * expected.abs() + 1e-6 * depth**0.5 * expected.abs().max()).all()


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("num_rows", [*range(2 * TILE_ROWS + 2), BLOCK_ROWS, BLOCK_ROWS + 1, 250])
def test_any_number_of_rows(check, num_rows, with_bias):
    if num_rows:
        check(num_rows, 40, 50, with_bias)
    else:
        assert linear(torch.ones(0, 50), to_panels(torch.ones(40, 50)), 40).shape == (0, 40)


@pytest.mark.parametrize("depth", [1, 7, 8, 9, BLOCK_DEPTH - 1, BLOCK_DEPTH, 2 * BLOCK_DEPTH + 2])
def test_any_depth(check, depth):
    check(7, 40, depth)


@pytest.mark.parametrize("num_rows", [7, 8, BLOCK_ROWS, BLOCK_ROWS + 8])
def test_rows_that_would_evict_each_other_from_the_cache(check, num_rows):
    check(num_rows, 40, 2048)  # rows are 8 KiB apart in fp32, and 4 KiB in bf16


@pytest.mark.parametrize("panels", [0, 1, 3, 4, 5, 9])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_any_number_of_columns(check, panels, more):
    num_columns = panels * panel_columns() + more
    if num_columns > 0:
        check(7, num_columns, 50)


@pytest.mark.parametrize("depth", [800, 2048])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_any_batch(dtype, depth):
    rows, weight, bias = make(131, 70, depth)
    panels = to_panels(weight.to(dtype))
    whole = linear(rows, panels, 70, bias)
    for start, end in ((0, 1), (3, 5), (50, 131), (90, 97)):
        assert torch.equal(linear(rows[start:end], panels, 70, bias), whole[start:end])


@needs_pairs
def test_a_row_of_pairs_has_the_same_bits_in_any_batch():
    rows, weight, bias = make(131, 70, 1700)
    rows, panels = rows.bfloat16(), to_pairs(weight.bfloat16())
    whole = linear(rows, panels, 70, bias)
    for start, end in ((0, 1), (3, 5), (50, 131), (90, 97)):
        assert torch.equal(linear(rows[start:end], panels, 70, bias), whole[start:end])


@pytest.mark.parametrize("with_bias", [True, False])
def test_rows_in_bf16_are_computed_in_fp32_and_rounded_once(with_bias):
    rows, weight, bias = make(9, 40, 900)
    rows, panels = rows.bfloat16(), to_panels(weight.bfloat16())
    got = linear(rows, panels, 40, bias if with_bias else None)
    whole = linear(rows.float(), panels, 40, bias if with_bias else None)
    assert torch.equal(got, whole.bfloat16())


def test_rows_of_any_shape_and_stride():
    rows, weight, _ = make(24, 20, 32)
    panels, expected = to_panels(weight), rows @ weight.T
    torch.testing.assert_close(linear(rows.view(2, 3, 4, 32), panels, 20).view(24, 20), expected)
    torch.testing.assert_close(linear(rows[::2], panels, 20), expected[::2])
    apart = rows.T.contiguous().T
    torch.testing.assert_close(linear(apart, panels, 20), expected)
    assert linear(rows[0], panels, 20).shape == (20,)


@needs_pairs
def test_unaligned_rows_of_pairs():
    rows, weight, _ = (tensor.bfloat16() for tensor in make(6, 20, 32))
    panels, expected = to_pairs(weight), linear(rows, to_pairs(weight), 20)
    odd = torch.zeros(6, 33, dtype=torch.bfloat16)[:, 1:].copy_(rows)
    assert torch.equal(linear(odd, panels, 20), expected)
    assert torch.equal(linear(rows.T.contiguous().T, panels, 20), expected)
    with pytest.raises(ValueError, match="do not match"):
        linear(rows.float(), panels, 20)


@pytest.mark.parametrize("size", [(1, 1), (16, 5), (37, 11)])
def test_panels_hold_the_weight(size):
    weight = torch.randn(size)
    panels = to_panels(weight)
    assert panels.shape == (-(-size[0] // panel_columns()), size[1], panel_columns())
    assert torch.equal(from_panels(panels, size[0]), weight)


@pytest.mark.parametrize("size", [(1, 2), (16, 6), (37, 10)])
def test_pairs_hold_the_weight(size):
    weight = torch.randn(size)
    panels = to_pairs(weight)
    assert panels.shape == (-(-size[0] // panel_columns()), size[1] // 2, panel_columns(), 2)
    assert torch.equal(from_panels(panels, size[0]), weight)


def test_invalid_shapes_are_rejected():
    rows, weight, bias = make(3, 20, 8)
    panels = to_panels(weight)
    wrong = [
        (rows[:, :7], panels, 20, bias),
        (rows, panels, 200, bias),
        (rows, panels, 20, bias[:19]),
        (rows, panels.transpose(1, 2), 20, bias),
        (rows.double(), panels, 20, None),
        (rows.bfloat16(), panels, 20, None),
        (rows, panels.half(), 20, None),
        (rows.bfloat16(), panels.bfloat16(), 20, bias[:19]),
        (rows.bfloat16(), panels.bfloat16(), 20, bias.bfloat16()),
        (rows.bfloat16(), to_pairs(weight), 20, bias),
        (rows.bfloat16()[:, :6], to_pairs(weight.bfloat16()), 20, bias),
    ]
    for arguments in wrong:
        with pytest.raises(ValueError, match="do not match"):
            linear(*arguments)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_activation_follows_the_bias_and_precedes_the_residual(name):
    """Columns that are no multiple of a panel, and numbers from -60 to 60."""
    rows, weight, bias = make(20, 40, 50)
    rows[0] *= 4
    activate = partial(F.gelu, approximate="tanh") if name == "gelu_tanh" else getattr(F, name)
    out, residual = torch.empty(20, 40), torch.randn(20, 40)
    kernel = product(rows, to_panels(weight), 40, bias, out, residual)
    kernel.arguments.activation = ACTIVATIONS[name]
    run(kernel)
    sums = rows.double() @ weight.double().T + bias
    torch.testing.assert_close(out, (activate(sums) + residual).float(), atol=1e-5, rtol=1e-6)
