"""From the name of a strategy to the strategy, with the memory it wants."""

from __future__ import annotations

from dataclasses import dataclass

from core.options import Batching, KVReservation, PreemptionMode
from strategies.base import Limits, Strategy
from strategies.continuous import ContinuousStrategy
from strategies.dynamic import DynamicStrategy
from strategies.memory.blocks import PagedMemory
from strategies.memory.slots import SlotMemory
from strategies.none import NoneStrategy
from strategies.paged import PagedStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategySettings:
    """Everything a strategy needs to know, resolved."""

    batching: Batching
    num_blocks: int
    block_size: int
    max_model_len: int
    limits: Limits
    max_delay_s: float
    kv_reservation: KVReservation
    enable_prefix_caching: bool
    preemption_mode: PreemptionMode
    num_swap_blocks: int


def make_strategy(settings: StrategySettings) -> Strategy:
    limits = settings.limits
    if settings.batching == "paged":
        memory = PagedMemory(
            settings.num_blocks,
            settings.block_size,
            num_host_blocks=settings.num_swap_blocks,
            caches_prefixes=settings.enable_prefix_caching,
        )
        return PagedStrategy(memory, limits, settings.preemption_mode)
    memory = SlotMemory(settings.num_blocks, settings.block_size)
    match settings.batching:
        case "none":
            return NoneStrategy(memory, limits)
        case "dynamic":
            return DynamicStrategy(memory, limits, settings.max_delay_s)
        case "continuous":
            return ContinuousStrategy(
                memory, limits, settings.kv_reservation, settings.max_model_len
            )
