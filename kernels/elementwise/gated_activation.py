"""`activation(gate) * up` of a gated MLP, for the output of a merged gate and up projection."""

from __future__ import annotations

from typing import Literal

import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import stride
from kernels.launch_plan import LaunchPlan, planned

Activation = Literal["silu", "gelu_tanh"]
TILE = 1024


@triton.jit
def gated_activation_kernel(
    out, gate_up, width, token_stride, ACTIVATION: tl.constexpr, TILE: tl.constexpr
):
    """Program (t, i) computes the i-th tile of TILE columns of token t."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_inside = columns < width
    gates = gate_up + token * token_stride + columns
    gate = tl.load(gates, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(gates + width, mask=is_inside, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        score = gate
    else:
        # gate * (1 + tanh(z)) / 2 = gate * sigmoid(2 z), with z from Hendrycks and Gimpel's paper.
        score = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    active = gate / (1.0 + tl.exp2(score * -1.4426950408889634))
    active = active.to(out.dtype.element_ty).to(tl.float32)
    product = (active * up).to(out.dtype.element_ty)
    tl.store(out + token * width + columns, product, mask=is_inside)


def gated_activation(gate_up: Tensor, activation: Activation) -> Tensor:
    """Return activation(gate) * up as a contiguous [T, I] of the same type.

    gate_up: [T, 2 * I], gates first, rows contiguous. Computed in fp32; the activation is rounded
    before it is multiplied by `up`, as in two torch operations. `silu` is gate * sigmoid(gate),
    `gelu_tanh` the tanh form of GELU (arXiv 1606.08415). Raises ValueError for other shapes and
    strides.
    """
    grid, scalars, options = _plan(gate_up)
    num_tokens, width = grid[0], scalars[0]
    out = gate_up.new_empty((num_tokens, width))
    if num_tokens:
        gated_activation_kernel[grid](out, gate_up, *scalars, ACTIVATION=activation, **options)
    return out


@planned
def _plan(gate_up: Tensor) -> LaunchPlan:
    if gate_up.ndim != 2 or gate_up.shape[1] % 2 or gate_up.stride(1) != 1:
        raise ValueError(
            f"gate_up is {list(gate_up.shape)} with strides {gate_up.stride()}; it must be "
            "[tokens, 2 * width] with contiguous rows"
        )
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    return LaunchPlan(
        (num_tokens, triton.cdiv(width, TILE)), (width, stride(gate_up, 0)), {"TILE": TILE}
    )
