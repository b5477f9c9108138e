"""Integers packed into int32, in the layouts of GPTQ, AWQ and compressed-tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def unpack_columns(packed: Tensor, bits: int) -> Tensor:
    """Unpack int32 [n, m] into codes [n, m * 32 / bits] in uint8, the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
    codes = (packed.int()[..., None] >> shifts) & (2**bits - 1)
    return codes.to(torch.uint8).flatten(1)


def unpack_rows(packed: Tensor, bits: int) -> Tensor:
    """Unpack int32 [n, m] into codes [n * 32 / bits, m] in uint8, the lowest bits first."""
    return unpack_columns(packed.T, bits).T
