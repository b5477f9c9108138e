"""The kernels of an attention backend that copy and swap whole blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kernels.cache.cache_table import CacheTable


@dataclass(frozen=True, slots=True)
class BlockKernels:
    """Functions that move whole KV blocks of all layers."""

    copy: Callable[[CacheTable, Tensor], None]
    """copy(table, pairs): copy block pairs[p, 0] to block pairs[p, 1]."""
    gather: Callable[[CacheTable, Tensor, Tensor], None]
    """gather(table, block_ids, staging): copy block block_ids[b] into row b of `staging`."""
    scatter: Callable[[CacheTable, Tensor, Tensor], None]
    """scatter(table, block_ids, staging): copy row b of `staging` into block block_ids[b]."""
