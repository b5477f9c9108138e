"""One forward pass over the KV cache, as every layer sees it."""

from __future__ import annotations

from torch import Tensor

from engine.attention.backends import AttentionBackend
from engine.attention.call import AttentionCall
from engine.attention.kv_cache import KVCache
from kernels.batch import PagedBatch


class PagedStep:
    """Travels to every layer as the argument `paged`."""

    def __init__(self, batch: PagedBatch, cache: KVCache, backend: AttentionBackend) -> None:
        self.batch = batch
        self.cache = cache
        self.backend = backend

    def attend(self, call: AttentionCall) -> Tensor:
        """Writes the K and V of these tokens, then attends to all so far of each sequence."""
        keys, values = self.cache.keys[call.layer], self.cache.values[call.layer]
        self.backend.write(call, keys, values, self.batch.slot_mapping)
        return self.backend.attend(call, keys, values, self.batch)
