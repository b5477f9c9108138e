"""Random quantized weights in the layout of the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.linear.quantized_linear import PER_BYTE, pack_pairs
from tests.engine.quantized_checkpoints import FP4


def make_codes(
    kind: str, size: tuple[int, ...], group_size: int
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return codes, scales, zeros, and the dequantized weight in fp64.

    kind: a key of PER_BYTE. size: [..., N, K].
    """
    *leading, num_outputs, num_inputs = size
    generator = torch.Generator().manual_seed(num_inputs + num_outputs)
    of_groups = (*leading, num_inputs // group_size, num_outputs)
    scales, zeros = torch.rand(of_groups, generator=generator) / 8 + 0.1, None
    factors = scales.double()
    if kind == "fp8":
        numbers = torch.randn(size, generator=generator).to(torch.float8_e4m3fn)
        codes, weight = numbers.view(torch.uint8), numbers.double()
    elif kind == "fp4":
        scales = torch.randint(118, 128, of_groups, generator=generator).to(torch.uint8)
        factors = torch.exp2(scales.double() - 127)
        codes = torch.randint(16, size, generator=generator).to(torch.uint8)
        signed = FP4 + tuple(-value for value in FP4)
        weight = torch.tensor(signed).double()[codes.int()]
    else:
        top = 16 if kind == "int4" else 256
        codes = torch.randint(top, size, generator=generator).to(torch.uint8)
        zeros = torch.randint(top, of_groups, generator=generator).to(torch.uint8)
        weight = codes.double() - zeros.mT.repeat_interleave(group_size, -1)
    if PER_BYTE[kind] == 2:
        codes = pack_pairs(codes.flatten(0, -2), group_size).unflatten(0, (*leading, num_outputs))
    return codes, scales, zeros, weight * factors.mT.repeat_interleave(group_size, -1)


def empty_codes(
    kind: str, size: tuple[int, ...], group_size: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return uninitialized codes, scales and zeros, for the dry run."""
    *leading, num_outputs, num_inputs = size
    of_groups = (*leading, num_inputs // group_size, num_outputs)
    codes = torch.empty(*leading, num_outputs, num_inputs // PER_BYTE[kind], dtype=torch.uint8)
    scales = torch.empty(of_groups, dtype=torch.uint8 if kind == "fp4" else torch.float32)
    zeros = torch.empty(of_groups, dtype=torch.uint8) if kind in ("int4", "int8") else None
    return codes, scales, zeros
