"""The batching strategies: one row each, with every property that other packages need.

The scheduling itself is in `strategies/<name>.py`. docs/design.md, "Adding a strategy", lists the
files that a new row needs.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Batching = Literal["none", "dynamic", "continuous", "paged"]
KVReservation = Literal["max", "pow2", "oracle"]
PreemptionMode = Literal["auto", "swap", "recompute"]
BATCHING_NAMES: tuple[Batching, ...] = typing.get_args(Batching)

DEFAULT_FOR_PACKED: Batching = "paged"
"""The strategy for a decoder that runs on the packed executor, unless the options name one."""
DEFAULT_FOR_TASKS: Batching = "continuous"
"""The strategy for tasks that do not generate text. For a user's handler it is `none` instead
(core/configuration/task.py)."""
DEFAULT_FOR_OTHERS: Batching = "dynamic"
"""The strategy for a model that generates text on transformers' own code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyTraits:
    """The properties of one strategy."""

    limit_option: Literal["batch_size", "max_rolling_batch_size"] | None
    """The option that limits how many sequences run at once. None: one at a time."""
    needs_packed_executor: bool = False
    """Changes the batch between steps, so it needs the packed executor for text generation. The
    other strategies run each batch to its end, so the library executor and other tasks can use them
    too."""
    has_kv_reservation: bool = False
    """Reserves KV memory as `option.kv_reservation` says. In the other strategies a sequence counts
    as `Sequence.max_length` tokens, reserved at admission or, if `is_paged`, allocated as the
    sequence grows."""
    is_paged: bool = False
    """Allocates KV blocks on demand, so it preempts: it may need swap space on the host."""


STRATEGIES: Mapping[Batching, StrategyTraits] = {
    "none": StrategyTraits(limit_option=None),
    "dynamic": StrategyTraits(limit_option="batch_size"),
    "continuous": StrategyTraits(
        limit_option="max_rolling_batch_size", needs_packed_executor=True, has_kv_reservation=True
    ),
    "paged": StrategyTraits(
        limit_option="max_rolling_batch_size", needs_packed_executor=True, is_paged=True
    ),
}
LIBRARY_NAMES = tuple(name for name, row in STRATEGIES.items() if not row.needs_packed_executor)
"""The strategies that work without the packed executor."""
TASK_NAMES = (*LIBRARY_NAMES, "continuous")
"""The strategies of tasks that do not generate text, except handlers. The first two run each batch
of requests to its end."""
ROLLING_NAMES = tuple(
    name for name, row in STRATEGIES.items() if row.limit_option == "max_rolling_batch_size"
)
"""The strategies that `option.max_rolling_batch_size` limits."""
PAGED_NAMES = tuple(name for name, row in STRATEGIES.items() if row.is_paged)
