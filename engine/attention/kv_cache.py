"""The tensors behind the block tables: K and V of every layer, in blocks."""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, partial

import torch
from torch import Tensor

from core.sizing import LayerShape, bytes_per_block

MADV_POPULATE_WRITE = 23
POPULATE_BYTES = 32 * 2**20
"""At a time, so that nobody waits long for the kernel's lock of this process's memory."""


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
                memory = _zeros(math.prod(shape) * dtype.itemsize)
                regions.append(memory)
                return memory.view(dtype).view(shape).transpose(1, 2)
            return torch.empty(num_blocks, block_size, num_heads, dim, dtype=dtype, device=device)

        regions: list[Tensor] = []
        self.block_size = block_size
        self.keys = [allocate(shape.num_kv_heads, shape.key_dim) for shape in shapes]
        self.values = [allocate(shape.num_kv_heads, shape.value_dim) for shape in shapes]
        _make_pages(regions)
        words = bytes_per_block(shapes, block_size, dtype.itemsize) // 8
        self.host = torch.empty(
            num_host_blocks, words, dtype=torch.int64, pin_memory=device.type == "cuda"
        )


def _zeros(num_bytes: int) -> Tensor:
    """Bytes of the host's memory, in huge pages where there are any, none of which is made yet."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # where the system, or its kernel, has none
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _make_pages(regions: Sequence[Tensor]) -> None:
    """Has the kernel make every page, so that no step waits for it to find and clear one.

    A thread in the background does it, which a start does not wait for either. Linux before 5.14
    cannot do that beside others who write; there all is written here.
    """
    pieces = [piece for region in regions for piece in region.split(POPULATE_BYTES)]
    if not pieces:
        return
    if _populate(pieces[0]) == errno.EINVAL:
        for region in regions:
            region.zero_()
    elif len(pieces) > 1:
        rest = partial(_populate_all, pieces[1:])
        threading.Thread(target=rest, name="populate-kv", daemon=True).start()


def _populate_all(pieces: list[Tensor]) -> None:
    while pieces:
        if _populate(pieces.pop(0)):
            return  # memory is short: pages are made as steps write them


def _populate(piece: Tensor) -> int:
    """Has the kernel make the pages of these bytes, whatever they hold; 0, or why it does not."""
    if sys.platform != "linux":
        return errno.EINVAL
    start = piece.data_ptr() & -mmap.PAGESIZE
    length = piece.data_ptr() + len(piece) - start
    result = _libc().madvise(
        ctypes.c_void_p(start), ctypes.c_size_t(length), MADV_POPULATE_WRITE
    )  # meanwhile other threads run
    return ctypes.get_errno() if result else 0


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
