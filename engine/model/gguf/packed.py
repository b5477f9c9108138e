"""Weights in those blocks of GGUF files that are codes with one scale for 32 inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.model.checkpoint import Checkpoint
from engine.model.quantization.weights import IntegerWeight

GROUP_SIZE = 32
SCALE_BYTES = 2
"""A block begins with its scale, in fp16."""


def _bytes(blocks: Tensor) -> Tensor:
    return blocks ^ 128  # two's complement, plus 128


def _nibbles(blocks: Tensor) -> Tensor:
    """The lower halves of the bytes are the first inputs."""
    return torch.cat([blocks & 15, blocks >> 4], -1)


def _fives(blocks: Tensor) -> Tensor:
    """The fifth bits of all inputs come before the nibbles."""
    shifts = torch.arange(8, dtype=torch.uint8)
    fifth = (blocks[..., :4, None] >> shifts & 1).flatten(-2)
    return _nibbles(blocks[..., 4:]) | fifth << 4


class Packing(NamedTuple):
    codes: Callable[[Tensor], Tensor]
    """Returns codes [out, blocks, 32] for the bytes of blocks, without their scales."""
    zero: int
    bits: int
    """In how many an `IntegerWeight` has them."""
    block_bytes: int


PACKED: Mapping[str, Packing] = {
    "Q8_0": Packing(_bytes, 128, 8, 34),
    "Q5_0": Packing(_fives, 16, 8, 22),
    "Q4_0": Packing(_nibbles, 8, 4, 18),
}
"""ggml's types that are served as they are: no value is rounded."""


class Gguf:
    """`quant_method: gguf`, of translated GGUF files: NAME.Q8_0 [out, bytes] and so on."""

    markers: tuple[str, ...] = tuple(f".{kind}" for kind in PACKED)
    unused_suffixes: tuple[str, ...] = ()

    def __init__(self, config: Mapping[str, Any]) -> None:
        pass  # the names of the tensors say everything

    def read(self, checkpoint: Checkpoint, name: str) -> IntegerWeight:
        kind = next(kind for kind in PACKED if f"{name}.{kind}" in checkpoint)
        return integer_weight(kind, checkpoint.take_stored(f"{name}.{kind}", torch.uint8))


def integer_weight(kind: str, rows: Tensor) -> IntegerWeight:
    """Return the weight of rows of blocks, [out, bytes] uint8. kind: a key of PACKED."""
    packing = PACKED[kind]
    blocks = rows.unflatten(1, (-1, packing.block_bytes))
    scales = blocks[..., :SCALE_BYTES].contiguous().view(torch.float16).float().squeeze(-1)
    codes = packing.codes(blocks[..., SCALE_BYTES:]).flatten(1)
    zeros = torch.full_like(scales, packing.zero, dtype=torch.uint8)
    return IntegerWeight(codes, scales, zeros, packing.bits, GROUP_SIZE)
