"""Quantized weights in the layout of the Triton kernels, for rows in fp16 or bf16 on CUDA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor

from engine.model.linear import Quantized
from engine.model.quantization.weights import (
    MXFP4_GROUP,
    Float4Weight,
    Float8Weight,
    IntegerWeight,
    unpack_neighbours,
)

KernelWeight = IntegerWeight | Float8Weight | Float4Weight
ROWS_AT_ONCE = 4096
"""Outputs whose codes are packed at a time, to save memory."""


@dataclass(frozen=True, slots=True)
class KernelCodes:
    """The tensors and constants of a weight, named as in `kernels.linear.quantized_linear`.

    There, the outputs are the last dimension of scales and zeros; here, they are the first.
    """

    codes: Tensor
    """[out, in] or [out, in / 2] uint8."""
    scales: Tensor
    """[out, groups] fp32, or uint8 exponents."""
    zeros: Tensor | None
    """[out, groups] uint8."""
    kind: str
    group_size: int

    @property
    def num_bytes(self) -> int:
        zeros = 0 if self.zeros is None else self.zeros.nbytes
        return self.codes.nbytes + self.scales.nbytes + zeros

    @classmethod
    def of(cls, weight: KernelWeight) -> KernelCodes:
        """Lay out a weight for which `has_kernel` is true."""
        kind, group_size = _kind(weight), _group_size(weight)
        match weight:
            case IntegerWeight():
                codes = _packed(weight) if kind == "int4" else weight.codes
                return cls(codes, weight.scales, weight.zeros, kind, group_size)
            case Float8Weight():
                return cls(weight.codes.view(torch.uint8), weight.scales, None, kind, group_size)
            case Float4Weight():
                return cls(_packed(weight), weight.exponents, None, kind, group_size)


def has_kernel(weight: Quantized) -> TypeGuard[KernelWeight]:
    """Whether the kernels support the weight's type and have a block size that fits its groups."""
    # Imported only here, so that CPUs do not need Triton.
    from kernels.linear.quantized_linear import block_size

    if not isinstance(weight, KernelWeight):
        return False
    return block_size(_kind(weight), weight.shape[1], _group_size(weight)) is not None


def _kind(weight: KernelWeight) -> str:
    """Return the kernels' name for the type of the codes."""
    match weight:
        case IntegerWeight():
            return f"int{weight.bits}"
        case Float8Weight():
            return "fp8"
        case Float4Weight():
            return "fp4"


def _group_size(weight: KernelWeight) -> int:
    return MXFP4_GROUP if isinstance(weight, Float4Weight) else weight.group_size


def _packed(weight: IntegerWeight | Float4Weight) -> Tensor:
    """Return the codes [out, in / 2], with two codes that are a block apart in each byte."""
    from kernels.linear.quantized_linear import pack_pairs

    num_outputs, num_inputs = weight.shape
    packed = weight.codes.new_empty(num_outputs, num_inputs // 2)
    places, parts = packed.split(ROWS_AT_ONCE), weight.codes.split(ROWS_AT_ONCE)
    for place, part in zip(places, parts, strict=True):
        codes = unpack_neighbours(part) if isinstance(weight, Float4Weight) else part
        place.copy_(pack_pairs(codes, _group_size(weight)))
    return packed
