"""The tensors behind the block tables: K and V of every layer, in blocks."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from core.sizing import LayerShape, bytes_per_block


class KVCache:
    """Per layer two tensors [num_blocks, block_size, kv_heads, head_dim].

    On a GPU they are uninitialized. On a CPU they are zero, and a head's part of a block is one run
    of memory. dtype: the model's, or fp8 e4m3 as float8_e4m3fn or as its bytes in uint8. `host` are
    blocks of all layers in the host's memory, [num_host_blocks, words] int64, pinned beside a GPU.
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
            if device.type == "cpu":
                shape = num_blocks, num_heads, block_size, dim
                memory = _resident(math.prod(shape) * dtype.itemsize)
                return memory.view(dtype).view(shape).transpose(1, 2)
            return torch.empty(num_blocks, block_size, num_heads, dim, dtype=dtype, device=device)

        self.block_size = block_size
        self.keys = [allocate(shape.num_kv_heads, shape.key_dim) for shape in shapes]
        self.values = [allocate(shape.num_kv_heads, shape.value_dim) for shape in shapes]
        words = bytes_per_block(shapes, block_size, dtype.itemsize) // 8
        self.host = torch.empty(
            num_host_blocks, words, dtype=torch.int64, pin_memory=device.type == "cuda"
        )


def _resident(num_bytes: int) -> Tensor:
    """Bytes of the host's memory, in huge pages where there are any, all of which are written once:
    no step waits for the kernel to find and clear pages, and what is lacking shows at the start."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # where the system, or its kernel, has none
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).zero_()
