"""The most likely token and the logsumexp of each row of logits."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels.cpu.calls import Kernel, run
from kernels.cpu.shared_library import SUFFIXES, function
from kernels.sampling import torch_logits


class Logits(ctypes.Structure):
    """Mirrors `struct Logits` in logits.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("best", "normalizers", "rows")),
        *((name, ctypes.c_int64) for name in ("num_rows", "width", "stride")),
    )


def best_tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Same as `kernels.sampling.torch_logits.best_tokens`, which gets inputs that the C++ cannot
    read."""
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
    run(Kernel(function("logits", logits.dtype), arguments))
    return best, normalizers
