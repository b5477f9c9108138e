"""Makes a strategy from its name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from core.configuration.kv_layout import KVLayout
from core.configuration.strategy_table import Batching, KVReservation, PreemptionMode
from strategies.base import Limits, Strategy

if TYPE_CHECKING:
    from strategies.memory.base import KVMemory
    from strategies.memory.blocks import PagedMemory
    from strategies.memory.slots import SlotMemory


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
    num_states: int = 0
    """How many states there is room for: those of running sequences, and spare ones; 0 if the
    model keeps none."""
    num_spare_states: int = 0
    """Of these, the states after drafts, which may be taken back."""
    num_checkpoints: int = 0
    """States of cached prefixes that there is room for besides. 0: no prefix is found."""
    answers_differ: bool = False
    """Whether a token of an answer has another state than the same one of a prompt."""
    num_swap_states: int = 0
    """Slots in the memory of the host."""
    num_host_checkpoints: int = 0
    """How many of them may have checkpoints, while no swapped sequence needs them."""


def make_strategy(settings: StrategySettings, memory: KVMemory | None = None) -> Strategy:
    """Make the strategy that the settings name. No other one is imported.

    memory: of another strategy, as these settings would make it; None: a new one.
    """
    limits = settings.limits
    if settings.batching == "paged":
        from strategies.memory.blocks import PagedMemory
        from strategies.paged import PagedStrategy

        if memory is None and settings.num_states:
            memory = _blocks_beside_states(settings)
        elif memory is None:
            memory = _kind_of_blocks(settings.layout)(
                settings.num_blocks,
                settings.layout,
                num_host_blocks=settings.num_swap_blocks,
                caches_prefixes=settings.enable_prefix_caching,
            )
        assert isinstance(memory, PagedMemory)
        return PagedStrategy(memory, limits, settings.preemption_mode)
    slots = _slots(settings) if memory is None else memory
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


def _kind_of_blocks(layout: KVLayout) -> type[PagedMemory]:
    if layout.has_windows:
        from strategies.memory.windows import WindowedMemory

        return WindowedMemory
    from strategies.memory.blocks import PagedMemory

    return PagedMemory


def _blocks_beside_states(settings: StrategySettings) -> PagedMemory:
    from strategies.memory import state_blocks
    from strategies.memory.checkpointed_states import CheckpointedStates
    from strategies.memory.host_slots import HostSlots

    host = HostSlots(settings.num_swap_states, settings.num_host_checkpoints)
    num_slots = settings.num_states, settings.num_spare_states, settings.num_checkpoints
    has_windows = settings.layout.has_windows
    kind = state_blocks.WindowedStateMemory if has_windows else state_blocks.StatePagedMemory
    return kind(
        settings.num_blocks,
        settings.layout,
        states=CheckpointedStates(*num_slots, host),
        checkpoint_tokens=settings.limits.max_step_tokens,
        answers_differ=settings.answers_differ,
        num_host_blocks=settings.num_swap_blocks,
    )


def _slots(settings: StrategySettings) -> SlotMemory:
    if settings.num_states:
        from strategies.memory.states import RunningStates, Slots, StateSlotMemory

        states = RunningStates(Slots(settings.num_states), settings.num_spare_states)
        return StateSlotMemory(settings.num_blocks, settings.layout, states=states)
    from strategies.memory.slots import SlotMemory

    return SlotMemory(settings.num_blocks, settings.layout)
