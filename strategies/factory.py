"""Makes a strategy from its name."""

from __future__ import annotations

from dataclasses import dataclass

from core.configuration.strategy_table import Batching, KVReservation, PreemptionMode
from strategies.base import Limits, Strategy
from strategies.continuous import ContinuousStrategy
from strategies.dynamic import DynamicStrategy
from strategies.memory.blocks import PagedMemory
from strategies.memory.slots import SlotMemory
from strategies.none import NoneStrategy
from strategies.paged import PagedStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategySettings:
    """The settings of all strategies, with every default resolved. A strategy uses some of them."""

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
    """Make the strategy that the settings name, with its memory."""
    limits, slots = settings.limits, SlotMemory(settings.num_blocks, settings.block_size)
    match settings.batching:
        case "none":
            return NoneStrategy(slots, limits)
        case "dynamic":
            return DynamicStrategy(slots, limits, settings.max_delay_s)
        case "continuous":
            reservation, longest = settings.kv_reservation, settings.max_model_len
            return ContinuousStrategy(slots, limits, reservation, longest)
        case "paged":
            blocks = PagedMemory(
                settings.num_blocks,
                settings.block_size,
                num_host_blocks=settings.num_swap_blocks,
                caches_prefixes=settings.enable_prefix_caching,
            )
            return PagedStrategy(blocks, limits, settings.preemption_mode)
