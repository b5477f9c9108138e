"""The KV cache and the batches of one forward pass, as the layers use them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from engine.attention.backends import AttentionBackend
from engine.attention.call import AttentionCall, Expands
from engine.attention.kv_cache import KVCache
from kernels.attention.batch import PagedBatch
from kernels.attention.sdpa import Scratch, attend_in_images

if TYPE_CHECKING:
    from engine.attention.expansion import StepExpansion
    from engine.attention.states import StateStep


class PagedStep:
    """The argument `paged` of every layer."""

    def __init__(
        self, batches: Sequence[PagedBatch], cache: KVCache, backend: AttentionBackend
    ) -> None:
        """batches: one for each of the cache's groups."""
        self.batches = batches
        self.cache = cache
        self.backend = backend
        self._scratch = Scratch()
        self._expansions: dict[int, StepExpansion | None] = {}
        """By cache group."""

    @property
    def states(self) -> StateStep:
        from engine.attention.states import StateStep

        batch, pool = self.batches[0], self.cache.states
        assert pool is not None, "the model keeps no state"
        assert batch.states is not None
        assert batch.in_prompt is not None
        return StateStep(pool, batch.states, batch.in_prompt)

    def expansion(
        self, layer: int, dims: tuple[int, int], expands: Expands
    ) -> StepExpansion | None:
        group = self.cache.group_of[layer]
        if group not in self._expansions:
            from engine.attention.expansion import expansion_of

            parts = (self.batches[group], self.cache, self.backend)
            self._expansions[group] = expansion_of(*parts, dims, expands)
        return self._expansions[group]

    def attend(self, call: AttentionCall) -> Tensor:
        """Write the new K and V, if any, then attend over each sequence's K and V so far."""
        keys, values = self.cache.keys[call.layer], self.cache.values[call.layer]
        batch = self.batches[self.cache.group_of[call.layer]]
        if not call.is_shared:
            self.backend.write(call, keys, self.cache.own_values[call.layer], batch.slot_mapping)
        out = self.backend.attend(call, keys, values, batch)
        if batch.images:
            attend_in_images(
                out,
                call.query,
                keys,
                values,
                batch,
                self._scratch,
                scale=call.scale,
                window=call.window,
                softcap=call.softcap,
                sinks=call.sinks,
            )
        return out
