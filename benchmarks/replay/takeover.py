"""Lets an engine with other options go on with the requests of another one, at any moment.

```
the same kind and size of memory    what runs goes on in its blocks; what is cached stays
another one                         what runs is preempted by recomputation; nothing is cached
```

`none`, `dynamic` and `continuous` have the same kind. Each of them reserves at least the longest
possible answer, so a sequence that runs has what the others would have reserved for it.
"""

from __future__ import annotations

from bisect import insort

from core.configuration.strategy_table import STRATEGIES
from engine.engine import Engine
from strategies.factory import StrategySettings
from strategies.group import SequenceGroup

_MEMORY = (
    "layout", "num_blocks", "enable_prefix_caching", "num_swap_blocks", "num_states",
    "num_checkpoints", "answers_differ", "num_swap_states", "num_host_checkpoints",
)  # fmt: skip


def has_same_memory(one: StrategySettings, other: StrategySettings) -> bool:
    """Whether strategies with these settings have memory of the same kind and size."""
    if one.num_states and one.limits != other.limits:  # they say how many states are spare
        return False
    is_paged, other_is_paged = (STRATEGIES[each.batching].is_paged for each in (one, other))
    return is_paged == other_is_paged and all(
        getattr(one, name) == getattr(other, name) for name in _MEMORY
    )


def take_over(engine: Engine, before: Engine) -> int:
    """Let an engine that is new go on with the requests of another one, which is of no use then.

    The two may have the same memory. Returns how many requests can never run with the new options,
    and are dropped.
    """
    engine.next_id, engine.in_flight = before.next_id, before.in_flight
    old, strategy = before.strategy, engine.strategy
    keeps_memory = strategy.memory is old.memory
    parts = {group: _parts(engine, group) for group in (*old.running, *old.waiting)}
    running = set(old.running)
    dropped = {group.request.id for group in parts if not parts[group]}
    for request_id in dropped:
        old.abort(request_id)
    for group in parts:
        if group.request.id in dropped:
            continue
        for sequence in () if keeps_memory else group.sequences:
            sequence.num_computed_tokens = 0
        for part in parts[group]:
            strategy.enqueue(part)
            if keeps_memory and group in running:
                strategy.waiting.remove(part)
                insort(strategy.running, part, key=lambda part: part.rank)
    return len(dropped)


def _parts(engine: Engine, group: SequenceGroup) -> list[SequenceGroup]:
    """Return the groups in which the sequences of a group can run; none if they cannot."""
    longest = max(sequence.max_length for sequence in group.sequences)
    return engine.strategy.split(group) if longest <= engine.facts.max_model_len else []
