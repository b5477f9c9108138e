"""Strided rows, as in a merged projection, with NaN between them."""

from __future__ import annotations

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}
"""Maximum error relative to each number. The best possible result is rounded once to its dtype. In
fp16 and bf16 this allows one rounding more, in fp32 about 30."""


def strided(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return random rows [tokens, ..., width]. Between tokens, there are gaps of 48 NaN."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens, *inner = shape
    numbers = torch.randn(shape, generator=generator)
    numbers *= torch.logspace(1, -3, num_tokens).view(-1, *[1] * len(inner))
    size = numbers[0].numel() if num_tokens else 0
    memory = torch.full((num_tokens, size + 48), float("nan"), dtype=dtype)
    memory[:, 16 : 16 + size] = numbers.flatten(1).to(dtype)
    return memory[:, 16 : 16 + size].unflatten(1, inner)


def check_close(got: Tensor, exact: Tensor) -> None:
    """Check against `exact`, which is fp64."""
    assert got.isfinite().all()
    limit = TOLERANCE[got.dtype] * exact.abs() + TOLERANCE[got.dtype] * 1e-2 * exact.abs().max()
    worst = ((got.double() - exact).abs() - limit).max()
    assert worst <= 0, worst
