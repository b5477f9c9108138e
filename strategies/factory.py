"""Makes a strategy from its name."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

from core.configuration.options import KVReservation, PreemptionMode
from core.configuration.strategy_table import Batching
from strategies.base import Limits, Strategy


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
    """Call `make(settings)` of the module that has the strategy's name.

    So adding a strategy needs no change here.
    """
    return import_module(f".{settings.batching}", __package__).make(settings)
