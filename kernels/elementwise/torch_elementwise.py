"""The functions of rms_norm.py, gated_activation.py and rotary.py in torch, for any device.

Names and signatures are the same. Results equal transformers' operations bit for bit.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(
    rows: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, rounds_first: bool = True
) -> Tensor:
    """Return `row / sqrt(mean(row²) + eps) * (weight + offset)` for every row [..., width].

    weight: [width], or [heads, width] for rows [T, heads, width].
    """
    numbers = rows.float()
    numbers = numbers * torch.rsqrt(numbers.pow(2).mean(-1, keepdim=True) + eps)
    if rounds_first:
        numbers = numbers.to(rows.dtype).float()
    return (numbers * (weight.float() + offset)).to(rows.dtype)


def add_rms_norm(
    hidden: Tensor,
    output: Tensor,
    weight: Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    rounds_first: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return `hidden + output` and the `rms_norm` of this sum; [T, width] each."""
    total = hidden + output
    return total, rms_norm(total, weight, eps, offset=offset, rounds_first=rounds_first)


def layer_norm(rows: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Return the LayerNorm of every row [..., width]. weight, bias: [width]."""
    return F.layer_norm(rows, weight.shape, weight, bias, eps)


def gated_activation(gate_up: Tensor, activation: Literal["silu", "gelu_tanh"]) -> Tensor:
    """Return activation(gate) * up, [T, I], for gate_up [T, 2 * I], gates first."""
    gate, up = gate_up.chunk(2, -1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


def sigmoid_gate(gate: Tensor, rows: Tensor) -> Tensor:
    """Return sigmoid(gate) * rows, both of one shape."""
    return torch.sigmoid(gate) * rows


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int) -> None:
    """Rotate the first `rotary_dim` dims of query and key [T, heads, head_dim] in place.

    cos, sin: [T, rotary_dim], or [T, rotary_dim / 2] if both halves share them.
    """
    half = rotary_dim // 2
    first_cos, first_sin = cos[:, None, :half], sin[:, None, :half]
    second_cos, second_sin = cos[:, None, -half:], sin[:, None, -half:]
    for rows in (query, key):
        first, second = rows[..., :half], rows[..., half:rotary_dim]
        turned = first * first_cos - second * first_sin, second * second_cos + first * second_sin
        first.copy_(turned[0])
        second.copy_(turned[1])
