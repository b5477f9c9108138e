"""One forward pass over the KV cache, as every layer sees it."""

from __future__ import annotations

from torch import Tensor

from engine.attention import AttentionCall
from engine.attention_backend import AttentionBackend
from engine.kv_cache import KVCache
from kernels.batch import PagedBatch


class PagedStep:
    """Travels to every layer as the keyword `paged`."""

    def __init__(
        self,
        batch: PagedBatch,
        cache: KVCache,
        backend: AttentionBackend,
        rows: Tensor | None = None,
    ) -> None:
        """rows: int64, the tokens whose logits are wanted; None: of all."""
        self.batch = batch
        self._rows = rows
        self.cache = cache
        self.backend = backend

    def rows_after(self, layer: int) -> Tensor | None:
        """The tokens whose hidden states are still wanted after a layer; None: all."""
        return self._rows if layer == len(self.cache.keys) - 1 else None

    def attend(self, call: AttentionCall) -> Tensor:
        """Writes the K and V of these tokens, then attends to all so far of each sequence."""
        keys, values = self.cache.keys[call.layer], self.cache.values[call.layer]
        self.backend.write(call, keys, values, self.batch.slot_mapping)
        return self.backend.attend(call, keys, values, self.batch)
