"""What has weights of its own and proposes tokens: a draft model, or a head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from core.configuration.kv_layout import CacheGroup, KVLayout
from engine.attention.kv_cache import KVCache
from engine.loading.packed_model import PackedModel
from engine.memory.capacity import BlockUse
from engine.resolve import Capacity, Resolved
from engine.sampling.rows import Stage
from engine.speculation.draft_model import DraftModel
from strategies.memory.base import KVMemory

MIB = 2**20


class Drafting(BlockUse, ABC):
    """The loaded weights. The methods are called in this order, once it is known what fits."""

    @property
    @abstractmethod
    def identity(self) -> tuple[object, ...]:
        """What the time of its passes depends on."""

    def attach(self, model: PackedModel, cache: KVCache) -> None:
        """Have the model's steps leave what drafts are made from. cache: of the model."""

    @abstractmethod
    def build(
        self,
        resolved: Resolved,
        capacity: Capacity,
        memory: KVMemory,
        stages: Sequence[Stage[Any]],
    ) -> DraftModel:
        """Allocate K and V for as many tokens as the model has. memory: of the model.

        stages: as in `Sampler`, for this use only.
        """


def layout_of_draft(
    resolved: Resolved, capacity: Capacity, block_bytes: int
) -> tuple[KVLayout, int]:
    """Return the layout of its K and V, and how many blocks have room for the model's tokens."""
    layout = KVLayout((CacheGroup(resolved.memory.block_size),), block_bytes)
    most = resolved.limits.max_sequences * layout.blocks_for(capacity.max_model_len)
    return layout, min(most, capacity.num_blocks)


def sizes_text(weights_bytes: int, kv_bytes: int) -> str:
    return f"{weights_bytes / MIB:,.1f} MiB of weights, {kv_bytes / MIB:,.1f} MiB of K and V"
