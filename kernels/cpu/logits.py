"""The likeliest token of each row of logits, and what its log-probability is taken from."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels import torch_logits
from kernels.cpu.library import SUFFIXES, function


class Logits(ctypes.Structure):
    """The same fields as in logits.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("best", "normalizers", "rows")),
        *((name, ctypes.c_int64) for name in ("num_rows", "width", "stride")),
    )


def best_tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
    """As `kernels.torch_logits.best_tokens`, which computes what is neither fp32 nor bf16."""
    if logits.dtype not in SUFFIXES or logits.stride(1) != 1 or logits.shape[1] == 0:
        return torch_logits.best_tokens(logits)
    best = logits.new_empty(len(logits), dtype=torch.int64)
    normalizers = logits.new_empty(len(logits), dtype=torch.float32)
    arguments = Logits(
        best=best.data_ptr(),
        normalizers=normalizers.data_ptr(),
        rows=logits.data_ptr(),
        num_rows=logits.shape[0],
        width=logits.shape[1],
        stride=logits.stride(0),
    )
    function("logits", logits.dtype)(ctypes.byref(arguments))
    return best, normalizers
