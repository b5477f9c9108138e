"""Options of `longshore serve` that a replay may change."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path

from core.configuration.batching import sequence_limit
from core.configuration.options import BatchingOptions, make_options, option_table
from core.configuration.record import Value
from core.configuration.strategy_table import STRATEGIES
from strategies.factory import StrategySettings

OPTIONS = (
    "batching", "batch_size", "max_batch_delay", "max_rolling_batch_size",
    "max_rolling_batch_prefill_tokens", "kv_reservation", "max_model_len", "num_kv_blocks",
    "enable_prefix_caching", "preemption_mode",
)  # fmt: skip


def add_recording(parser: argparse.ArgumentParser) -> None:
    """Add what says which requests of which recording are replayed, and how fast they arrive."""
    parser.add_argument(
        "recording", type=Path, nargs="?", metavar="DIR", help="the folder of option.record"
    )
    parser.add_argument(
        "--run", type=int, metavar="N", help="the engine's start to read, from 1 (default: last)"
    )
    parser.add_argument(
        "--load", type=positive, default=1.0, metavar="X",
        help="let requests arrive X times as fast (default: 1)",
    )  # fmt: skip


def add_options(group: argparse._ArgumentGroup) -> None:
    """Add the options to a parser of arguments."""
    for name in OPTIONS:
        row = option_table()[name]
        group.add_argument(
            f"--{name.replace('_', '-')}", type=row.parse, metavar=row.kind_text.upper(),
            help=row.doc.replace("%", "%%"),
        )  # fmt: skip


def given_options(given: argparse.Namespace) -> dict[str, Value]:
    """Return the options that were given, by name."""
    return {name: value for name in OPTIONS if (value := getattr(given, name)) is not None}


def positive(text: str) -> float:
    """Parse a number above 0, for `type` of an argument."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError("must be greater than 0")
    return value


def changed(settings: StrategySettings, changes: Mapping[str, Value]) -> StrategySettings:
    """Return the settings of a strategy with other options of `serve`.

    A model that keeps states has as many more of them as there are more sequences in a batch.

    Raises ConfigurationError for a value that is out of range.
    """
    options = make_options(dict(changes))
    strategy, memory = options.strategy, options.memory
    batching = strategy.batching or settings.batching
    limits = settings.limits
    if changes.keys() & {"batching", "batch_size", "max_rolling_batch_size"}:
        max_sequences = _max_sequences(changes, strategy, settings)
        limits = dataclasses.replace(limits, max_sequences=max_sequences)
    if strategy.max_rolling_batch_prefill_tokens is not None:
        limits = dataclasses.replace(
            limits, max_step_tokens=strategy.max_rolling_batch_prefill_tokens
        )
    more_sequences = max(0, limits.max_sequences - settings.limits.max_sequences)
    values = {
        "num_states": settings.num_states + more_sequences if settings.num_states else None,
        "max_delay_s": strategy.max_batch_delay / 1000 if "max_batch_delay" in changes else None,
        "kv_reservation": changes.get("kv_reservation"),
        "max_model_len": memory.max_model_len,
        "num_blocks": memory.num_kv_blocks,
        "enable_prefix_caching": changes.get("enable_prefix_caching"),
        "preemption_mode": changes.get("preemption_mode"),
    }
    given = {name: value for name, value in values.items() if value is not None}
    return dataclasses.replace(
        settings,
        batching=batching,
        limits=limits,
        **given,  # pyright: ignore[reportArgumentType]
    )


def _max_sequences(
    changes: Mapping[str, Value], strategy: BatchingOptions, settings: StrategySettings
) -> int:
    batching = strategy.batching or settings.batching
    limit = STRATEGIES[batching].limit_option
    if limit == STRATEGIES[settings.batching].limit_option and limit not in changes:
        return settings.limits.max_sequences  # the option is still set as it was
    return sequence_limit(strategy, batching)
