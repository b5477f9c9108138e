"""Runs several kernels in one call of the library.

Weights evict Python's code and objects from the CPU caches, so between two kernels a line of Python
takes several times as long as in a tight loop.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from kernels.cpu.shared_library import load_library

Arguments = TypeVar("Arguments", bound=ctypes.Structure, covariant=True)
SUFFIXES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
MANY = 2**62
"""More elements than any kernel reads."""


def function(name: str, dtype: torch.dtype) -> ctypes._NamedFuncPointer:
    """Return the kernel `name` of the library for a dtype."""
    return getattr(load_library(), f"{name}_{SUFFIXES[dtype]}")


class NoKernelError(ValueError):
    """The library has no kernel for these tensors; the message is the reason."""


def token_stride(out: Tensor, residual: Tensor | None = None) -> int:
    """Return how far apart the tokens of `out` lie, [T, ..., width].

    Raises NoKernelError if a token's numbers are not dense, or the residual lies in another way.
    """
    if not out[:1].is_contiguous() or (residual is not None and residual.stride() != out.stride()):
        raise NoKernelError("outputs are not contiguous, or the residual lies in another way")
    return out.stride(0)


class Kernel(NamedTuple, Generic[Arguments]):
    """A kernel of the library and the structure that it takes by reference."""

    function: ctypes._NamedFuncPointer
    arguments: Arguments
    kept: tuple[object, ...] = ()
    """Owners of the memory that the structure points to."""


class Call(ctypes.Structure):
    """Mirrors `struct Call` in calls.cpp."""

    _fields_ = (("kernel", ctypes.c_void_p), ("arguments", ctypes.c_void_p))


class Calls:
    """Runs kernels one after another, each with the current contents of its structure."""

    def __init__(self, kernels: Sequence[Kernel[Any]]) -> None:
        self._kernels = kernels  # keeps the structures and their memory alive
        addresses = [
            Call(ctypes.cast(function, ctypes.c_void_p), ctypes.addressof(arguments))
            for function, arguments, _ in kernels
        ]
        self._calls = (Call * len(addresses))(*addresses)
        self._run = load_library().run_calls

    def __call__(self, num_elements: int = MANY) -> None:
        """Run the kernels.

        num_elements: the elements that they read. If there are few, one thread runs all kernels.
        """
        self._run(self._calls, ctypes.c_int64(len(self._kernels)), ctypes.c_int64(num_elements))


def run(kernel: Kernel[Any], num_elements: int = MANY) -> None:
    """Run one kernel. num_elements: as in `Calls`."""
    Calls([kernel])(num_elements)
