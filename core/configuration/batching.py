"""Which batching strategy the options choose, and why."""

from __future__ import annotations

from dataclasses import dataclass

from core.configuration.options import Options
from core.configuration.strategy_table import (
    DEFAULT_FOR_OTHERS,
    DEFAULT_FOR_PACKED,
    LIBRARY_NAMES,
    STRATEGIES,
    Batching,
)
from core.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Choice:
    """The strategy that the options choose. `name` is None if they leave the choice to the model's
    task and executor; it is "none" if they choose the strategy of this name."""

    name: Batching | None
    reason: str

    @property
    def needs_packed_executor(self) -> bool:
        return self.name is not None and STRATEGIES[self.name].needs_packed_executor


def choose_batching(options: Options) -> Choice:
    """Return the strategy of `option.batching`, or the one that LMI's own keys imply.

    Raises ConfigurationError if the strategy does not work with `option.executor`.
    """
    choice = _implied(options)
    if options.model.executor == "library" and choice.needs_packed_executor:
        raise ConfigurationError(
            f"the strategy {choice.name} follows from {choice.reason}, but option.executor=library "
            f"cannot run it; it works with {' and '.join(LIBRARY_NAMES)}"
        )
    return choice


def _implied(options: Options) -> Choice:
    if options.strategy.batching is not None:
        return Choice(options.strategy.batching, f"option.batching={options.strategy.batching}")
    if options.strategy.batch_size is not None and options.strategy.batch_size > 1:
        return _dynamic(options)
    rolling = options.strategy.rolling_batch
    if rolling is None:
        return _without_rolling_batch(options)
    if rolling == "disable":
        return Choice("none", "option.rolling_batch=disable and no batch_size above 1")
    if rolling == "scheduler":
        return Choice("continuous", "option.rolling_batch=scheduler")
    if options.strategy.paged_attention is False:
        return Choice(
            "continuous", f"option.rolling_batch={rolling} and option.paged_attention=false"
        )
    return Choice("paged", f"option.rolling_batch={rolling}")


def _dynamic(options: Options) -> Choice:
    is_overridden = options.strategy.rolling_batch not in (None, "disable")
    note = f", which overrides option.rolling_batch={options.strategy.rolling_batch} as in LMI"
    return Choice(
        "dynamic", f"batch_size={options.strategy.batch_size}{note if is_overridden else ''}"
    )


def _without_rolling_batch(options: Options) -> Choice:
    if options.strategy.paged_attention is False:
        return Choice("continuous", "option.paged_attention=false")
    if options.strategy.paged_attention:
        return Choice("paged", "option.paged_attention=true")
    return Choice(
        None,
        f"default: {DEFAULT_FOR_PACKED} on the packed executor, otherwise {DEFAULT_FOR_OTHERS}",
    )
