"""Which batching strategy the options choose, and why."""

from __future__ import annotations

from dataclasses import dataclass

from core.configuration.options import BatchingOptions
from core.configuration.strategy_table import (
    DEFAULT_FOR_OTHERS,
    DEFAULT_FOR_PACKED,
    STRATEGIES,
    Batching,
)


@dataclass(frozen=True, slots=True)
class Choice:
    """The strategy that the options choose. `name` is None if they leave the choice to the model's
    task and executor; it is "none" if they choose the strategy of this name."""

    name: Batching | None
    reason: str

    @property
    def needs_packed_executor(self) -> bool:
        return self.name is not None and STRATEGIES[self.name].needs_packed_executor


def choose_batching(strategy: BatchingOptions) -> Choice:
    """Return the strategy of `option.batching`, or the one that LMI's own keys imply."""
    if strategy.batching is not None:
        return Choice(strategy.batching, f"option.batching={strategy.batching}")
    if strategy.batch_size is not None and strategy.batch_size > 1:
        return _dynamic(strategy)
    rolling = strategy.rolling_batch
    if rolling is None:
        return _without_rolling_batch(strategy)
    if rolling == "disable":
        return Choice("none", "option.rolling_batch=disable and no batch_size above 1")
    if rolling == "scheduler":
        return Choice("continuous", "option.rolling_batch=scheduler")
    if strategy.paged_attention is False:
        return Choice(
            "continuous", f"option.rolling_batch={rolling} and option.paged_attention=false"
        )
    return Choice("paged", f"option.rolling_batch={rolling}")


def _dynamic(strategy: BatchingOptions) -> Choice:
    is_overridden = strategy.rolling_batch not in (None, "disable")
    note = f", which overrides option.rolling_batch={strategy.rolling_batch} as in LMI"
    return Choice("dynamic", f"batch_size={strategy.batch_size}{note if is_overridden else ''}")


def _without_rolling_batch(strategy: BatchingOptions) -> Choice:
    if strategy.paged_attention is False:
        return Choice("continuous", "option.paged_attention=false")
    if strategy.paged_attention:
        return Choice("paged", "option.paged_attention=true")
    return Choice(
        None,
        f"default: {DEFAULT_FOR_PACKED} on the packed executor, otherwise {DEFAULT_FOR_OTHERS}",
    )
