"""Integers packed into int32, in the layouts of GPTQ, AWQ and compressed-tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def unpack_columns(packed: Tensor, bits: int) -> Tensor:
    """Return codes [n, m * 32 / bits] uint8 of int32 [n, m], the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
    codes = (packed.int()[..., None] >> shifts) & (2**bits - 1)
    return codes.to(torch.uint8).flatten(1)


def unpack_rows(packed: Tensor, bits: int) -> Tensor:
    """Return codes [n * 32 / bits, m] uint8 of int32 [n, m], the lowest bits first."""
    return unpack_columns(packed.T, bits).T


def sort_groups(groups: Tensor, group_size: int) -> Tensor | None:
    """Return the order [in] int64 that makes the inputs of each group neighbours, or None if
    they are.

    groups: [in], the group of each input (GPTQ's g_idx). Raises ValueError if a group does not
    have `group_size` inputs.
    """
    counts = torch.bincount(groups.long(), minlength=-(-len(groups) // group_size))
    if (counts != group_size).any():
        raise ValueError(f"g_idx does not give each group {group_size} inputs")
    if bool((groups[1:] >= groups[:-1]).all()):
        return None
    return groups.long().argsort(stable=True)
