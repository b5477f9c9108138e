"""What the kernels of this folder share: whose token a row is, and checks of their arguments."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import is_aligned, stride
from kernels.launch_plan import planned

ROW_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
STATE_DTYPES = (torch.float32, torch.bfloat16)
DIMS = (16, 32, 64, 128, 256)
MAX_TAPS = 4


def is_supported(dims: tuple[int, ...], *, is_sum: bool) -> bool:
    """Return whether the kernels support one tensor of a slot: tails [taps - 1, C] or, of sums, a
    matrix of all channels, [size, C], or of each head, [heads, dk, dv]."""
    if len(dims) == 3:
        return dims[1] in DIMS and dims[2] in DIMS
    is_known = dims[0] in DIMS if is_sum else 1 <= dims[0] < MAX_TAPS
    return is_known and dims[1] % 16 == 0


@triton.jit
def sequence_of(row, starts, num_sequences):
    """Return the sequence that a row belongs to: the last one that starts at or before it."""
    low, high = row * 0, row * 0 + num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        is_later = tl.load(starts + middle) <= row
        low = tl.where(is_later, middle, low)
        high = tl.where(is_later, high, middle)
    return low


@planned
def check_recurrence(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, states: Tensor
) -> None:
    """Raise ValueError for tensors that the kernels of the recurrence do not support."""
    num_heads, key_dim, value_dim = value.shape[1], query.shape[2], value.shape[2]
    if key_dim not in DIMS or value_dim not in DIMS or states.dtype not in STATE_DTYPES:
        raise ValueError(
            f"states are {key_dim} x {value_dim} {states.dtype}; both dims must be among {DIMS}, "
            "and the type float32 or bfloat16; kernels.state.reference takes any"
        )
    if states.shape[1:] != (num_heads, key_dim, value_dim) or not states[:1].is_contiguous():
        raise ValueError(
            f"states are {list(states.shape)}; a slot must be dense, "
            f"[{num_heads}, {key_dim}, {value_dim}]"
        )
    if states.stride(0) % 16:
        raise ValueError("the stride between slots must be a multiple of 16 elements")
    if key.shape != query.shape or num_heads % query.shape[1]:
        raise ValueError(
            f"{num_heads} heads cannot share queries {list(query.shape)} and keys "
            f"{list(key.shape)} evenly"
        )
    for rows in (query, key, value):
        if rows.dtype not in ROW_DTYPES or rows.dtype != value.dtype or not is_aligned(rows):
            raise ValueError(
                f"rows are {rows.dtype} with strides {rows.stride()}; all must be of one type, "
                "dense in the last dim, and their other strides multiples of 16 elements"
            )
        if stride(rows, 1) not in (0, rows.shape[2]):
            raise ValueError("the heads of a token must be dense")
    for gates in (decay, rate):
        if gates.dtype != torch.float32 or not gates.is_contiguous():
            raise ValueError("gates must be contiguous fp32")
