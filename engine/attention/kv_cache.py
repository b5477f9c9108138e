"""The paged KV cache: K and V of every layer, in blocks."""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, partial

import torch
from torch import Tensor

from core.configuration.kv_layout import LayerShape, bytes_per_block

MADV_POPULATE_WRITE = 23
POPULATE_BYTES = 2 * 2**20
"""Bytes populated per call, so that no thread waits long for Linux's lock of the address space."""
POPULATE_NICENESS = 19
"""The lowest priority: requests come first, and populating may take seconds."""


class KVCache:
    """Keys and values of each layer: [num_blocks, block_size, kv_heads, head_dim or value_dim].
    On a GPU they are uninitialized. On a CPU they are zero, and a head's rows of one block are
    contiguous in memory. If V is a part of K, it has no elements of its own. dtype: the model's
    dtype, float8_e4m3fn, or uint8 that holds the bytes of fp8 e4m3. `host` holds swapped blocks of
    all layers in host memory, [num_host_blocks, words] int64; it is pinned if the device is a GPU.
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
            if device.type == "cpu" and dim > 0:
                shape = num_blocks, num_heads, block_size, dim
                memory = _zeros(math.prod(shape) * dtype.itemsize)
                regions.append(memory)
                return memory.view(dtype).view(shape).transpose(1, 2)
            return torch.empty(num_blocks, block_size, num_heads, dim, dtype=dtype, device=device)

        regions: list[Tensor] = []
        self.block_size = block_size
        self.keys = [allocate(shape.num_kv_heads, shape.key_dim) for shape in shapes]
        self.values = [allocate(shape.num_kv_heads, shape.value_dim) for shape in shapes]
        _populate_in_background(regions)
        words = bytes_per_block(shapes, block_size, dtype.itemsize) // 8
        self.host = torch.empty(
            num_host_blocks, words, dtype=torch.int64, pin_memory=device.type == "cuda"
        )


def _zeros(num_bytes: int) -> Tensor:
    """Reserve zeroed bytes of host memory, in huge pages if available; no page is allocated yet."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # not Linux, or a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _populate_in_background(regions: Sequence[Tensor]) -> None:
    """Have Linux allocate every page, so that no step waits until a page is found and cleared.

    A background thread does it, so that the start does not wait either. Linux before 5.14 has no
    call for it. There this function writes zeros to all of the memory, before any step uses it.
    """
    pieces = [piece for region in regions for piece in region.split(POPULATE_BYTES)]
    if not pieces:
        return
    if _populate(pieces[0]) == errno.EINVAL:
        for region in regions:
            region.zero_()
    elif len(pieces) > 1:
        # NOTE: not a daemon, which Python would stop inside torch's code, aborting the process.
        rest = partial(_populate_all, pieces[1:])
        threading.Thread(target=rest, name="populate-kv").start()


def _populate_all(pieces: list[Tensor]) -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), POPULATE_NICENESS)  # of this thread
    while pieces and threading.main_thread().is_alive():  # else the process is about to end
        if _populate(pieces.pop(0)):
            return  # memory is short: pages are allocated as steps write them


def _populate(piece: Tensor) -> int:
    """Have Linux allocate the pages of these bytes, without changing them; return 0 or an errno."""
    if sys.platform != "linux":
        return errno.EINVAL
    start = piece.data_ptr() & -mmap.PAGESIZE
    length = piece.data_ptr() + len(piece) - start
    result = _libc().madvise(
        ctypes.c_void_p(start), ctypes.c_size_t(length), MADV_POPULATE_WRITE
    )  # ctypes releases the GIL, so other threads run meanwhile
    return ctypes.get_errno() if result else 0


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
