"""The tensors behind the block tables: K and V of every layer, in blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention import AttentionCall
from kernels.batch import PagedBatch
from kernels.sdpa import Scratch, paged_attention
from kernels.torch_cache import write_kv


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
    """Per layer two tensors [num_blocks, block_size, kv_heads, head_dim], uninitialized."""

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        def allocate(num_heads: int, dim: int) -> Tensor:
            return torch.empty(num_blocks, block_size, num_heads, dim, dtype=dtype, device=device)

        self.block_size = block_size
        self.keys = [allocate(shape.num_kv_heads, shape.key_dim) for shape in shapes]
        self.values = [allocate(shape.num_kv_heads, shape.value_dim) for shape in shapes]


def bytes_per_block(shapes: Sequence[LayerShape], block_size: int, dtype: torch.dtype) -> int:
    return sum(shape.numel for shape in shapes) * block_size * dtype.itemsize


class PagedStep:
    """One forward pass over the cache; travels to every layer as the keyword `paged`."""

    def __init__(self, batch: PagedBatch, cache: KVCache, scratch: Scratch) -> None:
        self._batch = batch
        self._cache = cache
        self._scratch = scratch

    def attend(self, call: AttentionCall) -> Tensor:
        keys, values = self._cache.keys[call.layer], self._cache.values[call.layer]
        write_kv(call.key, call.value, keys, values, self._batch.slot_mapping)
        return paged_attention(
            call.query,
            keys,
            values,
            self._batch,
            self._scratch,
            scale=call.scale,
            window=call.window,
            softcap=call.softcap,
            sinks=call.sinks,
        )
