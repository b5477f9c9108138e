"""The C++ LayerNorm against torch's in fp64."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu import elementwise
from kernels.elementwise import torch_elementwise
from tests.kernels.elementwise_inputs import strided

EPS = 1e-5


def norm_without_twin(monkeypatch, rows, weight, bias):
    """Fail if the kernel falls back to torch."""
    with monkeypatch.context() as patches:
        patches.setattr(elementwise, "torch_elementwise", None)
        return elementwise.layer_norm(rows, weight, bias, EPS)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 64), (3, 896), (600, 80), (5, 3, 64)])
def test_layer_norm(monkeypatch, shape, dtype, has_bias):
    rows, weight = strided(*shape, dtype=dtype), torch.linspace(0.5, 1.5, shape[-1]).to(dtype)
    rows += rows.amax(-1, keepdim=True)
    bias = weight.flip(0) if has_bias else None
    got = norm_without_twin(monkeypatch, rows, weight, bias)
    wide = None if bias is None else bias.double()
    exact = torch_elementwise.layer_norm(rows.double(), weight.double(), wide, EPS)
    absolute, relative = (4e-6, 2e-6) if dtype == torch.float32 else (1e-3, 2**-7)
    torch.testing.assert_close(got.double(), exact, atol=absolute, rtol=relative)


def test_widths_without_a_kernel_fall_back_to_torch():
    rows = torch.randn(3, 24)
    weight, bias = torch.randn(2, 24)
    expected = torch_elementwise.layer_norm(rows, weight, bias, EPS)
    assert torch.equal(elementwise.layer_norm(rows, weight, bias, EPS), expected)
