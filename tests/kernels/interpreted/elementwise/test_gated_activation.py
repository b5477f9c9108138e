"""gated_activation in Triton's interpreter, against its definition in fp64; see ../conftest.py."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.elementwise import torch_elementwise
from kernels.elementwise.gated_activation import gated_activation
from tests.kernels.elementwise_inputs import check_close, strided

pytestmark = pytest.mark.filterwarnings("ignore:overflow")  # e^-gate may overflow, as on a GPU


def exact(gate_up, activation):
    gate, up = gate_up.double().chunk(2, -1)
    if activation == "silu":
        return gate / (1 + (-gate).exp()) * up
    return 0.5 * gate * (1 + (math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)).tanh()) * up


@pytest.mark.matrix
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("tokens", "width"), [(5, 48), (3, 1025), (2, 2816), (1, 7)])
def test_against_fp64(tokens, width, dtype, activation):
    gate_up = strided(tokens, 2 * width, dtype=dtype)
    out = gated_activation(gate_up, activation)
    assert out.is_contiguous()
    check_close(out, exact(gate_up, activation))
    twin = torch_elementwise.gated_activation(gate_up, activation)
    # For large negative gates, torch's 1 + tanh is 0, where the kernel still gives about 1e-7.
    assert ((out - twin).abs() > 1e-5 * out.abs().max()).float().mean() < 0.02


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_large_gates_give_zero_or_themselves(activation):
    gate_up = torch.tensor([[-1e30, -200.0, 0.0, 200.0, 1e30, 1.0, 1.0, 1.0, 1.0, 1.0]])
    assert gated_activation(gate_up, activation).tolist() == [
        [0.0, 0.0, 0.0, 200.0, torch.tensor(1e30).item()]
    ]


def test_no_tokens_and_invalid_inputs():
    assert gated_activation(torch.zeros(0, 8), "silu").shape == (0, 4)
    for bad in (torch.zeros(2, 7), torch.zeros(2, 2, 8), torch.zeros(8, 2).T):
        with pytest.raises(ValueError, match="contiguous rows"):
            gated_activation(bad, "silu")
