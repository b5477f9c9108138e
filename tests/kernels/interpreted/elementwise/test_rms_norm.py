"""rms_norm in Triton's interpreter, against its definition in fp64; see ../conftest.py."""

from __future__ import annotations

import pytest
import torch

from kernels.elementwise import torch_elementwise
from kernels.elementwise.rms_norm import MAX_WIDTH, add_rms_norm, rms_norm
from tests.kernels.elementwise_inputs import check_close, strided

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
EPS = 1e-5


def exact(rows, weight, offset=0.0):
    rows, weight = rows.double(), weight.double()
    return rows / (rows.square().mean(-1, keepdim=True) + EPS).sqrt() * (weight + offset)


def make_weight(width, dtype):
    return torch.rand(width, generator=torch.Generator().manual_seed(1)).add(0.5).to(dtype)


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [(7, 64), (5, 100), (3, 896), (2, 5120), (2, 8192), (1, 4096), (5, 3, 64), (3, 33, 80),
     (1, 2, 128), (4, 1, 256)],
)  # fmt: skip
def test_against_fp64(shape, dtype):
    rows, weight = strided(*shape, dtype=dtype), make_weight(shape[-1], dtype)
    before = rows.clone()
    for options in ({}, {"rounds_first": False}, {"offset": 1.0, "rounds_first": False}):
        out = rms_norm(rows, weight, EPS, **options)
        assert out.is_contiguous()
        check_close(out, exact(rows, weight, options.get("offset", 0.0)))
        twin = torch_elementwise.rms_norm(rows, weight, EPS, **options)
        assert (out != twin).float().mean() < (1 if dtype == torch.float32 else 0.02)
    assert torch.equal(rows, before)


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 3, 64), (3, 33, 80), (4, 1, 256)])
def test_a_weight_for_each_head(shape, dtype):
    rows = strided(*shape, dtype=dtype)
    weight = make_weight(shape[1] * shape[2], dtype).view(shape[1:])
    for options in ({}, {"offset": 1.0, "rounds_first": False}):
        out = rms_norm(rows, weight, EPS, **options)
        for head in range(shape[1]):
            one = rms_norm(rows[:, head], weight[head], EPS, **options)
            assert torch.equal(out[:, head], one)


def test_the_order_of_rounding_matters():
    rows, weight = strided(9, 512, dtype=torch.bfloat16), make_weight(512, torch.bfloat16)
    first, last = (rms_norm(rows, weight, EPS, rounds_first=flag) for flag in (True, False))
    assert (first != last).float().mean() > 0.05


def test_heads_in_a_transposed_tensor():
    """A [heads, T, dim] view, as for q and k norms of some models; the result is a view too."""
    rows, weight = strided(5, 3, 64, dtype=torch.float32), make_weight(64, torch.float32)
    rows = rows.transpose(0, 1)
    out = rms_norm(rows, weight, EPS)
    check_close(out, exact(rows, weight))
    assert out.transpose(0, 1).is_contiguous()


def test_weights_of_another_dtype_and_no_rows():
    rows, weight = strided(3, 64, dtype=torch.float32), make_weight(64, torch.bfloat16)
    check_close(rms_norm(rows, weight, EPS), exact(rows, weight))
    check_close(
        rms_norm(rows.half(), weight.float() + 0.001, EPS, rounds_first=False),
        exact(rows.half(), weight.float() + 0.001),
    )
    assert rms_norm(rows[:0], weight, EPS).shape == (0, 64)


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 64), (5, 100), (3, 896), (2, 5120), (2, 8192), (33, 24)])
def test_add_rms_norm_equals_two_operations(shape, dtype):
    hidden, weight = strided(*shape, dtype=dtype), make_weight(shape[-1], dtype)
    output = strided(*shape, dtype=dtype, seed=7)
    before = hidden.clone(), output.clone()
    for options in ({}, {"rounds_first": False}, {"offset": 1.0, "rounds_first": False}):
        total, normed = add_rms_norm(hidden, output, weight, EPS, **options)
        assert torch.equal(total, hidden + output)
        assert torch.equal(normed, rms_norm(hidden + output, weight, EPS, **options))
        check_close(normed, exact(total, weight, options.get("offset", 0.0)))
        assert total.is_contiguous()
        assert normed.is_contiguous()
    assert torch.equal(hidden, before[0])
    assert torch.equal(output, before[1])


def test_add_rms_norm_of_no_rows_and_invalid_inputs():
    weight = torch.ones(64)
    total, normed = add_rms_norm(torch.zeros(0, 64), torch.zeros(0, 64), weight, EPS)
    assert total.shape == normed.shape == (0, 64)
    rows = torch.zeros(2, 64)
    for hidden, output in (
        (rows, rows.half()),
        (rows, rows[:1]),
        (rows[:, None], rows[:, None]),
        (rows, torch.zeros(64, 2).T),
    ):
        with pytest.raises(ValueError, match=r"of one type|contiguous"):
            add_rms_norm(hidden, output, weight, EPS)


@pytest.mark.parametrize(
    ("rows", "weight", "message"),
    [
        (torch.zeros(2, 64), torch.zeros(32), "they must be"),
        (torch.zeros(2, 3, 64), torch.zeros(2, 64), "they must be"),
        (torch.zeros(2, 64), torch.zeros(2, 64), "they must be"),
        (torch.zeros(64), torch.zeros(64), "they must be"),
        (torch.zeros(1, 1, 2, 64), torch.zeros(64), "they must be"),
        (torch.zeros(1, 2 * MAX_WIDTH), torch.zeros(2 * MAX_WIDTH), "width at most"),
        (torch.zeros(64, 64).T, torch.zeros(64), "contiguous"),
        (torch.zeros(2, 64), torch.zeros(128)[::2], "contiguous"),
        (torch.zeros(2, 64).bfloat16(), torch.zeros(64), "would widen"),
    ],
)
def test_invalid_inputs(rows, weight, message):
    with pytest.raises(ValueError, match=message):
        rms_norm(rows, weight, EPS)
