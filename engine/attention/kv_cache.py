"""The paged KV cache: K and V of every layer, in blocks."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from core.configuration.kv_layout import CacheGroup, KVLayout, LayerShape

if TYPE_CHECKING:
    from engine.attention.states import StatePool

MADV_POPULATE_WRITE = 23
POPULATE_BYTES = 2 * 2**20
"""Bytes populated per call, so that no thread waits long for Linux's lock of the address space."""
POPULATE_NICENESS = 19
"""The lowest priority: requests come first, and populating may take seconds."""


class KVCache:
    """Keys and values of each layer: [num_blocks, block_size, kv_heads, head_dim or value_dim].

    Blocks are those that kernels know, see `CacheGroup.num_parts`. If there is one group, each of
    these tensors has its own memory. If there are several, all are views of one memory, as a block
    may hold the layers of any group:

    ```
    a block of   group 0   | keys of layer 0 | values of layer 0 | keys of layer 1 | ...
                 group 1   | keys of layer 5, part 0, part 1 | values of layer 5, part 0, ...
    ```

    On a GPU they are uninitialized. On a CPU they are zero, and a head's rows of one block are
    contiguous in memory. If K and V share dims, both are views of the same rows, see `LayerShape`.
    dtype: the model's dtype, float8_e4m3fn, or uint8 that holds the bytes of fp8 e4m3. `host` holds
    swapped blocks of all layers in host memory, [num_host_blocks, words] int64; it is pinned if the
    device is a GPU.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        num_blocks: int,
        layout: KVLayout,
        dtype: torch.dtype,
        device: torch.device,
        num_host_blocks: int = 0,
        states: StatePool | None = None,
        bytes_beside: int = 0,
    ) -> None:
        """states: the slots of layers that keep a state, which lie beside the blocks.

        bytes_beside: what somebody keeps of the tokens in a block, beside K and V.
        """

        def allocate(numel: int, num_spare: int = 0) -> Tensor:
            count = num_blocks + num_spare
            if device.type == "cpu":
                memory = _zeros(count * numel * dtype.itemsize)
                regions.append(memory)
                memory = memory.view(dtype).view(count, numel)
            else:
                memory = torch.empty(count, numel, dtype=dtype, device=device)
            self.blocks.append(memory[:num_blocks])
            return memory

        regions: list[Tensor] = []
        self.states = states
        self.block_size = layout.groups[0].part_size
        self.groups = layout.groups
        self.blocks: list[Tensor] = []
        """All memory, as tensors [num_blocks, elements] for whoever moves whole blocks."""
        is_shared = len(layout.groups) > 1
        shared = allocate(layout.block_bytes // dtype.itemsize) if is_shared else None
        found: dict[int, tuple[int, list[Tensor]]] = {}
        for index, group in enumerate(layout.groups):
            start = 0
            for layer in group.layers or range(len(shapes)):
                shape = shapes[layer]
                if shape.source is not None:
                    continue
                rows: list[Tensor] = []
                for dim in shape.row_dims:
                    numel = group.block_size * shape.num_kv_heads * dim
                    memory = allocate(numel) if shared is None else shared
                    rows.append(_view(memory, start, group, shape.num_kv_heads, dim))
                    start += 0 if shared is None else numel
                found[layer] = index, rows
        sources = [index if s.source is None else s.source for index, s in enumerate(shapes)]
        self.group_of = [found[source][0] for source in sources]
        """The index of each layer's group."""
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.own_values: list[Tensor] = []
        """The dims of V that are not dims of K, too."""
        for source in sources:
            shape, (_, rows) = shapes[source], found[source]
            self.keys.append(rows[0][..., -shape.key_dim :])
            self.values.append(rows[-1][..., : shape.value_dim + shape.shared_dim])
            self.own_values.append(rows[-1][..., : shape.value_dim])
        self.beside: Tensor | None = None
        """[num_blocks + 1, elements]: what is kept beside each block; and a row for padding."""
        if bytes_beside:
            self.beside = allocate(bytes_beside // dtype.itemsize, num_spare=1)
        _populate_in_background(regions, weakref.ref(self))
        words = sum(memory.shape[1] for memory in self.blocks) * dtype.itemsize // 8
        self.host = torch.empty(
            num_host_blocks, words, dtype=torch.int64, pin_memory=device.type == "cuda"
        )


def _view(memory: Tensor, start: int, group: CacheGroup, num_heads: int, dim: int) -> Tensor:
    """View the keys or values of a layer, which begin at element `start` of each block."""
    size = group.part_size
    stride = memory.shape[1] if group.num_parts == 1 else size * num_heads * dim
    count = max(0, (len(memory) - 1) * group.part_stride + group.num_parts)
    is_cpu = memory.device.type == "cpu"
    inner = (dim, size * dim, 1) if is_cpu else (num_heads * dim, dim, 1)
    return memory.as_strided((count, size, num_heads, dim), (stride, *inner), start)


def _zeros(num_bytes: int) -> Tensor:
    """Reserve zeroed bytes of host memory, in huge pages if available; no page is allocated yet."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # not Linux, or a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _populate_in_background(regions: Sequence[Tensor], owner: weakref.ref[KVCache]) -> None:
    """Have Linux allocate every page, so that no step waits until a page is found and cleared.

    A background thread does it, so that the start does not wait either. The thread ends early if
    `owner` is freed. Linux before 5.14 has no call for it. There this function writes zeros to all
    of the memory, before any step uses it.
    """
    pieces = [piece for region in regions for piece in region.split(POPULATE_BYTES)]
    if not pieces:
        return
    if _populate(pieces[0]) == errno.EINVAL:
        for region in regions:
            region.zero_()
    elif len(pieces) > 1:
        # NOTE: not a daemon, which Python would stop inside torch's code, aborting the process.
        rest = partial(_populate_all, pieces[1:], owner)
        threading.Thread(target=rest, name="populate-kv").start()


def _populate_all(pieces: list[Tensor], owner: weakref.ref[KVCache]) -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), POPULATE_NICENESS)  # of this thread
    # If the main thread has ended, the process is about to end.
    while pieces and owner() is not None and threading.main_thread().is_alive():
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
