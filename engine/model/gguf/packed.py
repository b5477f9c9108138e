"""Weights in those blocks of GGUF files that are codes with a scale, and perhaps a minimum.

No value is rounded, but that of a minimum's subtraction. Layouts: ggml's ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.model.checkpoint import Checkpoint
from engine.model.quantization.weights import Float4Weight, IntegerWeight, OffsetWeight

Coded = IntegerWeight | OffsetWeight | Float4Weight
GROUP = 32
"""Inputs that share a scale; in some K-quants half as many."""


class Packing(NamedTuple):
    block_bytes: int
    weight: Callable[[Tensor], Coded]
    """Makes the weight of blocks [out, blocks, block_bytes]."""


def _q8_0(blocks: Tensor) -> Coded:
    codes = blocks[..., 2:] ^ 128  # two's complement, plus 128
    return _without_minimums(codes, _half(blocks, 0), 128, 8)


def _q4_0(blocks: Tensor) -> Coded:
    return _without_minimums(_nibbles(blocks[..., 2:]), _half(blocks, 0), 8, 4)


def _q5_0(blocks: Tensor) -> Coded:
    fifth = _fields(blocks[..., 2:6, None], 1).flatten(-2)
    codes = _nibbles(blocks[..., 6:]) | fifth << 4
    return _without_minimums(codes, _half(blocks, 0), 16, 8)


def _q4_k(blocks: Tensor) -> Coded:
    """Pairs of groups share bytes: the first has their lower halves."""
    groups = blocks[..., 16:].unflatten(-1, (4, GROUP))
    codes = torch.stack([groups & 15, groups >> 4], -2).flatten(-3)
    return _with_minimums(codes, *_scales_and_minimums(blocks), 4)


def _q5_k(blocks: Tensor) -> Coded:
    """A byte of the fifth bits has one of each group."""
    groups = blocks[..., 48:].unflatten(-1, (4, GROUP))
    low = torch.stack([groups & 15, groups >> 4], -2).flatten(-3, -2)
    fifth = _fields(blocks[..., 16:48, None], 1).transpose(-2, -1)
    return _with_minimums((low | fifth << 4).flatten(-2), *_scales_and_minimums(blocks), 8)


def _q6_k(blocks: Tensor) -> Coded:
    """Each half of a block has four groups of 32: 64 bytes of nibbles, and 32 of pairs of bits."""
    nibbles = blocks[..., :128].unflatten(-1, (2, 64))
    low = torch.cat([nibbles & 15, nibbles >> 4], -1)
    pairs = blocks[..., 128:192].unflatten(-1, (2, GROUP))
    high = _fields(pairs[..., None], 2).transpose(-2, -1).flatten(-2)
    codes = (low | high << 4).flatten(-2)
    scales = _half(blocks, 208) * blocks[..., 192:208].contiguous().view(torch.int8).float()
    return _with_minimums(codes, scales, 32 * scales, 8)


def _mxfp4(blocks: Tensor) -> Coded:
    codes = _nibbles(blocks[..., 1:])
    neighbours = codes[..., ::2] | codes[..., 1::2] << 4
    return Float4Weight(neighbours.flatten(1), blocks[..., 0])


PACKED: Mapping[str, Packing] = {
    "Q8_0": Packing(34, _q8_0),
    "Q5_0": Packing(22, _q5_0),
    "Q4_0": Packing(18, _q4_0),
    "Q6_K": Packing(210, _q6_k),
    "Q5_K": Packing(176, _q5_k),
    "Q4_K": Packing(144, _q4_k),
    "MXFP4": Packing(17, _mxfp4),
}
"""ggml's types whose codes are served as they are."""


class Gguf:
    """`quant_method: gguf`, of translated GGUF files: NAME.Q8_0 [out, bytes] and so on."""

    markers: tuple[str, ...] = tuple(f".{kind}" for kind in PACKED)
    unused_suffixes: tuple[str, ...] = ()

    def __init__(self, config: Mapping[str, Any]) -> None:
        pass  # the names of the tensors say everything

    def read(self, checkpoint: Checkpoint, name: str) -> Coded:
        kind = next(kind for kind in PACKED if f"{name}.{kind}" in checkpoint)
        return coded_weight(kind, checkpoint.take_stored(f"{name}.{kind}", torch.uint8))


def coded_weight(kind: str, rows: Tensor) -> Coded:
    """Return the weight of rows of blocks, [out, bytes] uint8. kind: a key of PACKED."""
    packing = PACKED[kind]
    return packing.weight(rows.unflatten(1, (-1, packing.block_bytes)))


def _without_minimums(codes: Tensor, scales: Tensor, zero: int, bits: int) -> IntegerWeight:
    scales = scales.flatten(1)
    zeros = torch.full_like(scales, zero, dtype=torch.uint8)
    return IntegerWeight(codes.flatten(1), scales, zeros, bits, GROUP)


def _with_minimums(codes: Tensor, scales: Tensor, minimums: Tensor, bits: int) -> OffsetWeight:
    """scales, minimums: [out, blocks, groups]."""
    size = codes.shape[-1] // scales.shape[-1]
    return OffsetWeight(codes.flatten(1), scales.flatten(1), minimums.flatten(1), bits, size)


def _scales_and_minimums(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return those of Q4_K and Q5_K: 6 bits each, in 12 bytes, times a number of the block."""
    packed = blocks[..., 4:16]
    first, second, rest = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat([first & 63, rest & 15 | first >> 6 << 4], -1)
    minimums = torch.cat([second & 63, rest >> 4 | second >> 6 << 4], -1)
    return _half(blocks, 0) * scales.float(), _half(blocks, 2) * minimums.float()


def _half(blocks: Tensor, start: int) -> Tensor:
    """Return the fp16 number at this byte of each block, [out, blocks, 1] fp32."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(blocks: Tensor) -> Tensor:
    """The lower halves of the bytes are the first inputs."""
    return torch.cat([blocks & 15, blocks >> 4], -1)


def _fields(blocks: Tensor, bits: int) -> Tensor:
    """Return the fields of each byte, the lowest first: [..., 8 / bits] for [..., 1]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    return blocks >> shifts & (2**bits - 1)
