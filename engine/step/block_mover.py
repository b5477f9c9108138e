"""Copies and swaps whole KV blocks, as a plan asks, before its forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.errors import ConfigurationError
from core.plan import BlockMoves, BlockPairs
from engine.attention.backends import AttentionBackend
from engine.attention.kv_cache import KVCache
from engine.staging import Staging
from kernels.cache.cache_table import cache_table

MAX_SWAP_ROWS = 16
"""Blocks in the device's swap buffer at once; a block of all layers takes megabytes."""


class CopyStream:
    """Copies to the host while kernels run, so that the kernels do not wait for the bus.

    On CUDA, the copies have a stream of their own. On a CPU everything runs in order.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def after_kernels(self) -> Iterator[None]:
        """Let copies within the context wait for all kernels launched before."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def finish(self) -> None:
        """Let all that is launched from now on wait for the copies."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


class BlockMover:
    """Launches block moves in the order of BlockMoves: swaps out, swaps in, copies.

    Does not wait for them.
    """

    def __init__(self, cache: KVCache, backend: AttentionBackend) -> None:
        """Raises ConfigurationError if blocks of this model and block size cannot be moved."""
        try:
            self._table = cache_table(cache.blocks)
        except ValueError as error:
            raise ConfigurationError(
                f"option.block_size={cache.block_size}: {error}; use 16"
            ) from error
        device = cache.blocks[0].device
        self._kernels = backend.block_kernels
        self._host = cache.host
        self._states = cache.states
        self._staging = Staging(device)
        self._to_host = CopyStream(device)
        num_rows = min(MAX_SWAP_ROWS, len(cache.host))
        self._buffer = torch.empty(
            num_rows, self._table.words_per_block, dtype=torch.int64, device=device
        )

    def launch(self, moves: BlockMoves) -> None:
        sources, targets, copies = self._staging.upload(
            [
                np.array([block for block, _ in moves.swap_outs], np.int64),
                np.array([block for _, block in moves.swap_ins], np.int64),
                _pairs(moves.copies),
            ]
        )
        self._swap_out(sources, [host for _, host in moves.swap_outs])
        self._swap_in([host for host, _ in moves.swap_ins], targets)
        if len(copies):
            self._kernels.copy(self._table, copies)
        if self._states is not None:
            self._states.swap(moves.state_swap_outs, moves.state_swap_ins)

    def _swap_out(self, blocks: Tensor, host_blocks: list[int]) -> None:
        for start in range(0, len(host_blocks), MAX_SWAP_ROWS):
            part = blocks[start : start + MAX_SWAP_ROWS]
            self._to_host.finish()  # the buffer is free again
            self._kernels.gather(self._table, part, self._buffer)
            with self._to_host.after_kernels():
                for row in range(len(part)):
                    self._host[host_blocks[start + row]].copy_(self._buffer[row], non_blocking=True)

    def _swap_in(self, host_blocks: list[int], blocks: Tensor) -> None:
        if host_blocks:
            self._to_host.finish()  # these blocks are in the host's memory, and the buffer is free
        for start in range(0, len(host_blocks), MAX_SWAP_ROWS):
            part = blocks[start : start + MAX_SWAP_ROWS]
            for row in range(len(part)):
                self._buffer[row].copy_(self._host[host_blocks[start + row]], non_blocking=True)
            self._kernels.scatter(self._table, part, self._buffer)


def _pairs(pairs: BlockPairs) -> NDArray[np.int64]:
    """Return [P, 2] int64."""
    return np.array(pairs, np.int64).reshape(-1, 2)
