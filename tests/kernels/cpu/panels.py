"""One weight in the panels of `kernels.cpu.linear`."""

from __future__ import annotations

from kernels.cpu.linear import fill_panels


def to_panels(weight):
    return fill_panels([weight], weight.dtype)


def to_pairs(weight):
    return fill_panels([weight], weight.dtype, in_pairs=True)
