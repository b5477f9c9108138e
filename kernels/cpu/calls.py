"""Several kernels in one call of the library.

Between two kernels Python finds its own code and objects gone from the caches, which the weights
went through: a line of it takes several times as long as in a loop of its own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

from kernels.cpu.library import load_library


class Kernel(NamedTuple):
    """A function of the library, and what it takes by reference."""

    function: ctypes._NamedFuncPointer
    arguments: ctypes.Structure


class Call(ctypes.Structure):
    """The same fields as in calls.cpp."""

    _fields_ = (("kernel", ctypes.c_void_p), ("arguments", ctypes.c_void_p))


class Calls:
    """Of kernels, one after another, each with what its structure holds by then."""

    def __init__(self, kernels: Sequence[Kernel]) -> None:
        self._kernels = kernels  # which keeps their structures where they are
        addresses = [
            Call(ctypes.cast(function, ctypes.c_void_p), ctypes.addressof(arguments))
            for function, arguments in kernels
        ]
        self._calls = (Call * len(addresses))(*addresses)
        self._run = load_library().run_calls

    def __call__(self) -> None:
        self._run(self._calls, ctypes.c_int64(len(self._kernels)))
