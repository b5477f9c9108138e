"""Which batching strategy the options choose, why, and the limits of its steps."""

from __future__ import annotations

from dataclasses import dataclass

from core.configuration.options import BatchingOptions, MemoryOptions, Options
from core.configuration.sizing import length_limit
from core.configuration.strategy_table import (
    DEFAULT_FOR_OTHERS,
    DEFAULT_FOR_PACKED,
    STRATEGIES,
    Batching,
)

DEFAULT_STEP_TOKENS = {"cuda": 8192, "cpu": 512}
DEFAULT_BATCH_SIZE = 32
LEAST_STATES = 6
"""Four sequences that fork before each step take so many: two of them may go on in two each."""


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


def sequence_limit(strategy: BatchingOptions, batching: Batching) -> int:
    """Return the maximum number of sequences that a strategy runs at once, given enough memory."""
    match STRATEGIES[batching].limit_option:
        case None:
            return 1
        case "batch_size":
            return strategy.batch_size or DEFAULT_BATCH_SIZE
        case "max_rolling_batch_size":
            return strategy.max_rolling_batch_size


def state_limit(max_sequences: int) -> int:
    """Return how many states running sequences may need, among them a search four wide."""
    return max(max_sequences, LEAST_STATES)


def checkpoint_limit(memory: MemoryOptions, batching: Batching, max_sequences: int) -> int:
    """Return how many states a strategy keeps of cached prefixes, given enough memory."""
    if not STRATEGIES[batching].is_paged or not memory.enable_prefix_caching:
        return 0
    return max_sequences if memory.state_checkpoints is None else memory.state_checkpoints


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The limits that follow from the options and the model's config, before memory is known."""

    max_model_len: int
    max_sequences: int
    max_step_tokens: int


def packed_limits(
    options: Options, batching: Batching, device: str, trained_len: int | None
) -> StepLimits:
    """Return the limits of a strategy on the packed executor. device: cuda or cpu.

    Raises ConfigurationError as `length_limit` does.
    """
    budget = options.strategy.max_rolling_batch_prefill_tokens
    step_tokens = budget or DEFAULT_STEP_TOKENS[device]
    # With fewer tokens per step than sequences, the newest sequences would never be scheduled.
    max_sequences = min(sequence_limit(options.strategy, batching), step_tokens)
    return StepLimits(length_limit(options.memory, trained_len), max_sequences, step_tokens)
