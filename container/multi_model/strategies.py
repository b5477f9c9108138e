"""Serves one model under several batching strategies, each as a model with the strategy's name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from container.configuration.properties import Setting
from container.configuration.resolve import Configuration
from container.multi_model.overrides import Overrides
from core.configuration.options import Options
from core.configuration.strategy_table import BATCHING_NAMES
from core.configuration.suggest import did_you_mean
from core.errors import ConfigurationError

FLAG = "--strategies"
_SHARE_STEPS = 10_000
"""GPU shares are rounded down to multiples of 1/10,000, so that their sum does not exceed
option.gpu_memory_utilization."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The strategies to serve one model with."""

    options: Options
    """The options of the front process."""
    overrides: Mapping[str, Overrides]
    """The settings of each strategy's container, by the strategy's name."""


def read_strategies(text: str) -> tuple[str, ...]:
    """Return the strategies in a list such as `none,paged`, or all of them for `all`.

    Raises ConfigurationError for unknown and repeated names.
    """
    if text.strip() == "all":
        return BATCHING_NAMES
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in BATCHING_NAMES:
            raise ConfigurationError(
                f"{FLAG} {text}: no strategy {name!r}{did_you_mean(name, BATCHING_NAMES)}; give "
                f"all, or some of {','.join(BATCHING_NAMES)}"
            )
        if names.count(name) > 1:
            raise ConfigurationError(f"{FLAG} {text}: {name} is named twice; name it once")
    return names


def compare_strategies(
    names: Sequence[str],
    configuration: Configuration,
    properties: Path | None,
    flags: Sequence[Setting],
    gpus: Sequence[str],
) -> Comparison:
    """Return the settings to serve a model with each of these strategies.

    configuration: the result of `properties`, `flags` and the environment. The strategies divide
    the GPU memory that this configuration allows. Raises ConfigurationError if `flags` name a
    strategy.
    """
    if any(flag.key == "option.batching" for flag in flags):
        raise ConfigurationError(f"{FLAG} and --batching both name strategies; give one of them")
    options = configuration.options
    # The front process decides who sees the page.
    own = {} if options.server.ui == "false" else {"option.ui": "true"}
    if gpus and options.execution.device != "cpu":
        share = options.memory.gpu_memory_utilization / math.ceil(len(names) / len(gpus))
        rounded = math.floor(share * _SHARE_STEPS) / _SHARE_STEPS
        own["option.gpu_memory_utilization"] = f"{rounded:g}"
    kept = [flag for flag in flags if flag.key not in own]
    fixed = [Setting(key, text, FLAG) for key, text in own.items()]
    return Comparison(
        options,
        {
            name: Overrides(properties, (*kept, *fixed, Setting("option.batching", name, FLAG)))
            for name in names
        },
    )
