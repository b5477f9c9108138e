"""The tensors behind the block tables: K and V of every layer, in blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps per token. K and V may differ in size (multi-head latent attention)."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def numel(self) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim)


class KVCache:
    """Per layer two tensors [num_blocks, block_size, kv_heads, head_dim], uninitialized.

    dtype: the model's, or fp8 e4m3 as float8_e4m3fn or as its bytes in uint8. `host` are blocks of
    all layers in the host's memory, [num_host_blocks, words] int64, pinned beside a GPU.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_host_blocks: int = 0,
    ) -> None:
        def allocate(num_heads: int, dim: int) -> Tensor:
            return torch.empty(num_blocks, block_size, num_heads, dim, dtype=dtype, device=device)

        self.block_size = block_size
        self.keys = [allocate(shape.num_kv_heads, shape.key_dim) for shape in shapes]
        self.values = [allocate(shape.num_kv_heads, shape.value_dim) for shape in shapes]
        words = bytes_per_block(shapes, block_size, dtype) // 8
        self.host = torch.empty(
            num_host_blocks, words, dtype=torch.int64, pin_memory=device.type == "cuda"
        )


def bytes_per_block(shapes: Sequence[LayerShape], block_size: int, dtype: torch.dtype) -> int:
    return sum(shape.numel for shape in shapes) * block_size * dtype.itemsize
