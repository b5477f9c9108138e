"""What rms_norm.py, gated_activation.py and rotary.py do, in torch, on any device.

Same names, signatures and meaning, and to the bit what transformers' own operations give.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(
    rows: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, rounds_first: bool = True
) -> Tensor:
    """`row / sqrt(mean(row²) + eps) * (weight + offset)` of every row [..., width]."""
    numbers = rows.float()
    numbers = numbers * torch.rsqrt(numbers.pow(2).mean(-1, keepdim=True) + eps)
    if rounds_first:
        numbers = numbers.to(rows.dtype).float()
    return (numbers * (weight.float() + offset)).to(rows.dtype)


def gated_activation(gate_up: Tensor, activation: Literal["silu", "gelu_tanh"]) -> Tensor:
    """activation(gate) * up; gate_up [T, 2 * I], gates first → [T, I]."""
    gate, up = gate_up.chunk(2, -1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int) -> None:
    """Turns the first `rotary_dim` dims of query and key [T, heads, head_dim], in place.

    cos, sin: [T, rotary_dim], or [T, rotary_dim / 2] where one half serves both.
    """
    half = rotary_dim // 2
    first_cos, first_sin = cos[:, None, :half], sin[:, None, :half]
    second_cos, second_sin = cos[:, None, -half:], sin[:, None, -half:]
    for rows in (query, key):
        first, second = rows[..., :half], rows[..., half:rotary_dim]
        turned = first * first_cos - second * first_sin, second * second_cos + first * second_sin
        first.copy_(turned[0])
        second.copy_(turned[1])
