"""What has weights of its own and proposes tokens: a draft model, or a head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from core.configuration.kv_layout import CacheGroup, KVLayout, LayerShape
from engine.attention.backends import make_backend
from engine.attention.kv_cache import KVCache
from engine.attention.states import StatePool
from engine.loading.packed_model import PackedModel
from engine.memory.capacity import BlockUse
from engine.resolve import Capacity, Resolved
from engine.sampling.rows import Stage
from engine.sampling.sampler import Sampler
from engine.speculation.draft_model import DraftModel, DraftSettings
from engine.staging import Staging
from engine.step.column import Column
from engine.step.packed_executor import PackedExecutor
from engine.step.passes import PackedForward, Passes
from strategies.memory.base import KVMemory

MIB = 2**20


class DraftForward(PackedForward, Protocol):
    """What runs a pass, with K and V of its own."""

    @property
    def shapes(self) -> Sequence[LayerShape]: ...


@dataclass(slots=True)
class Drafting(BlockUse, ABC):
    """The loaded weights. The methods are called in this order, once it is known what fits."""

    name: str
    """For notes: that of its directory, or "" if the model's own files have it."""
    weights_bytes: int
    block_bytes: int
    """Bytes of its K and V of as many tokens as a block of the model has at least."""

    @property
    @abstractmethod
    def identity(self) -> tuple[object, ...]:
        """What the time of its passes depends on."""

    def bytes_elsewhere(self, layout: KVLayout) -> int:
        return self.block_bytes

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

    def allocated(
        self,
        model: DraftForward,
        longest: int,
        resolved: Resolved,
        capacity: Capacity,
        stages: Sequence[Stage[Any]],
        columns: Sequence[Column] = (),
        states: StatePool | None = None,
    ) -> DraftSettings:
        """Allocate K and V for `build`, and make what runs the passes.

        model: what has these weights. longest: the most tokens of a sequence that it can read.
        states: those that its layers keep, if they keep any.
        """
        layout = KVLayout((CacheGroup(resolved.memory.block_size),), self.block_bytes)
        most = resolved.limits.max_sequences * layout.blocks_for(capacity.max_model_len)
        num_blocks = min(most, capacity.num_blocks)
        kv_dtype, device = resolved.kv_dtype, model.device
        backend, _ = make_backend(
            device,
            model.shapes,
            layout.block_size,
            capacity.max_model_len,
            kv_dtype,
            in_segments=False,
        )
        cache = KVCache(model.shapes, num_blocks, layout, kv_dtype, device, states=states)
        sampler = Sampler(Staging(device), stages)
        sizes = (
            f"{self.weights_bytes / MIB:,.1f} MiB of weights, "
            f"{num_blocks * self.block_bytes / MIB:,.1f} MiB of K and V"
        )
        if states is not None:
            sizes += f", {states.rows.nbytes / MIB:,.1f} MiB for {len(states.rows)} states"
        return DraftSettings(
            executor=PackedExecutor(Passes(model, cache, backend), sampler, columns),
            layout=layout,
            num_blocks=num_blocks,
            max_step_tokens=capacity.max_step_tokens,
            longest=longest,
            description=f"{self.name} ({sizes})".strip(),
        )
