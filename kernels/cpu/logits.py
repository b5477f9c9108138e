"""The most likely token and the logsumexp of each row of logits."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels.cpu.calls import SUFFIXES, Calls, Kernel, function
from kernels.sampling import torch_logits


class Logits(ctypes.Structure):
    """Mirrors `struct Logits` in logits.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("best", "normalizers", "rows")),
        *((name, ctypes.c_int64) for name in ("num_rows", "width", "stride")),
    )


class BestTokens:
    """Same as `kernels.sampling.torch_logits.best_tokens`, which gets inputs that the C++ cannot
    read. One thread at a time may call it."""

    def __init__(self) -> None:
        self._arguments = Logits()
        self._dtype: torch.dtype | None = None
        """Of the logits that `_run` reads."""

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        if logits.dtype not in SUFFIXES or logits.stride(1) != 1 or logits.shape[1] == 0:
            return torch_logits.best_tokens(logits)
        if logits.dtype != self._dtype:
            self._run = Calls([Kernel(function("logits", logits.dtype), self._arguments)])
            self._dtype = logits.dtype
        best = logits.new_empty(len(logits), dtype=torch.int64)
        normalizers = logits.new_empty(len(logits), dtype=torch.float32)
        arguments = self._arguments
        arguments.best, arguments.normalizers = best.data_ptr(), normalizers.data_ptr()
        arguments.rows, arguments.stride = logits.data_ptr(), logits.stride(0)
        arguments.num_rows, arguments.width = logits.shape
        self._run()
        return best, normalizers
