"""Makes a strategy from its name."""

from __future__ import annotations

from dataclasses import dataclass

from core.configuration.kv_layout import KVLayout
from core.configuration.strategy_table import Batching, KVReservation, PreemptionMode
from strategies.base import Limits, Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategySettings:
    """The settings of all strategies, with every default resolved. A strategy uses some of them."""

    batching: Batching
    num_blocks: int
    layout: KVLayout
    max_model_len: int
    limits: Limits
    max_delay_s: float
    kv_reservation: KVReservation
    enable_prefix_caching: bool
    preemption_mode: PreemptionMode
    num_swap_blocks: int


def make_strategy(settings: StrategySettings) -> Strategy:
    """Make the strategy that the settings name, with its memory. No other one is imported."""
    limits, num_blocks, layout = settings.limits, settings.num_blocks, settings.layout
    if settings.batching == "paged":
        from strategies.memory.blocks import PagedMemory
        from strategies.paged import PagedStrategy

        blocks = PagedMemory(
            num_blocks,
            layout,
            num_host_blocks=settings.num_swap_blocks,
            caches_prefixes=settings.enable_prefix_caching,
        )
        return PagedStrategy(blocks, limits, settings.preemption_mode)
    from strategies.memory.slots import SlotMemory

    slots = SlotMemory(num_blocks, layout)
    match settings.batching:
        case "none":
            from strategies.none import NoneStrategy

            return NoneStrategy(slots, limits)
        case "dynamic":
            from strategies.dynamic import DynamicStrategy

            return DynamicStrategy(slots, limits, settings.max_delay_s)
        case "continuous":
            from strategies.continuous import ContinuousStrategy

            reservation, longest = settings.kv_reservation, settings.max_model_len
            return ContinuousStrategy(slots, limits, reservation, longest)
