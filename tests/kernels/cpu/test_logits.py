"""The C++ logits kernels against torch: widths at vector edges, ties, infinities, views."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu.logits import BestTokens
from kernels.sampling import torch_logits

DTYPES = [torch.float32, torch.bfloat16]
best_tokens = BestTokens()


def check(logits):
    best, normalizers = best_tokens(logits)
    expected = torch_logits.best_tokens(logits)
    assert best.dtype == torch.int64
    assert normalizers.dtype == torch.float32
    assert torch.equal(best, expected[0])
    torch.testing.assert_close(normalizers, expected[1], atol=1e-5, rtol=1e-6, equal_nan=True)


@pytest.mark.parametrize("width", [1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 97, 1000, 8192, 50257])
@pytest.mark.parametrize("dtype", DTYPES)
def test_widths(dtype, width):
    generator = torch.Generator().manual_seed(width)
    check((torch.randn(5, width, generator=generator) * 8).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_give_the_first_index(dtype):
    logits = torch.zeros(64, 50, dtype=dtype)
    check(logits)
    for row in range(len(logits)):
        logits[row, [row % 50, (row * 7) % 50, (row * 13) % 50]] = 3.0
    check(logits)


@pytest.mark.parametrize("dtype", DTYPES)
def test_banned_tokens(dtype):
    logits = torch.full((4, 37), -torch.inf, dtype=dtype)
    logits[0, 36], logits[1, 3], logits[2, 20], logits[3, 0] = 1.5, -80.0, 300.0, -2.0
    check(logits)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_with_nan_or_infinity(dtype, bad):
    for width in (7, 40):
        for place in (0, 5, width - 1):
            logits = torch.randn(3, width).to(dtype)
            logits[1, place] = bad
            logits[2] = bad
            check(logits)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_views(dtype):
    check(torch.randn(6, 200).to(dtype)[1:5:2, 30:130])


def test_large_numbers_do_not_overflow():
    check(torch.tensor([[1e4, -1e4, 9999.0], [-1e4, -2e4, -3e4]]))


def test_unsupported_inputs_fall_back_to_torch():
    rows = torch.randn(3, 40)
    for logits in (rows.half(), rows.double(), rows.t()):
        check(logits)


def test_no_rows():
    best, normalizers = best_tokens(torch.empty(0, 40))
    assert len(best) == len(normalizers) == 0
