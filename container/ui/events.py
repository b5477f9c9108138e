"""The events of the live page.

```
engine     the strategy and its limits; at the start, and again for each new engine
down       why there is no engine now
snapshot   core.protocol.snapshot.Snapshot, and counters since the engine's start
```
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from container.wire.engine_connection import EngineConnection
from core.configuration.options import Options
from core.configuration.strategy_table import STRATEGIES
from core.errors import EngineUnavailableError
from core.protocol.facts import Facts
from core.protocol.snapshot import Snapshot
from core.protocol.stats import Stats

SILENCE_S = 1.0
"""A comment is sent after this time without an event, so that a closed page is noticed."""
_COMMENT = b":\n\n"
_DRAFTS = "spec_decode_"
"""In the names of the totals that the page shows. Others may name clients."""


def event_stream(
    engine: EngineConnection, options: Options, about: Mapping[str, object]
) -> Iterator[bytes]:
    """Yield an engine's events until the worker stops or the caller closes the generator.

    about: what the page shows of the model, besides what the engine and the options say.
    """
    known: Facts | str = ""
    snapshot: Snapshot | None = None
    while not engine.snapshots.is_closed:
        state = _state(engine)
        if isinstance(state, str) and state != known:
            yield _event("down", {"reason": state})
        elif isinstance(state, Facts) and state is not known:
            yield _event("engine", {**about, **_settings(state, options)})
        if snapshot is not None:
            yield _event(
                "snapshot", {"snapshot": snapshot, "counters": _counters(engine.state.stats)}
            )
        else:
            yield _COMMENT
        known = state
        snapshot = engine.snapshots.wait(SILENCE_S)


def _state(engine: EngineConnection) -> Facts | str:
    try:
        return engine.state.facts
    except EngineUnavailableError as error:
        return str(error)


def _settings(facts: Facts, options: Options) -> dict[str, object]:
    proposer, num_drafts = options.speculation.chosen
    return {
        "model": options.source.model_id or facts.model,
        "batching": facts.batching,
        "is_paged": STRATEGIES[facts.batching].is_paged,
        "executor": facts.executor,
        "device": facts.device,
        "dtype": facts.dtype,
        "block_size": facts.block_size,
        "max_sequences": facts.max_sequences,
        "max_model_len": facts.max_model_len,
        "max_step_tokens": facts.max_step_tokens,
        "max_batch_delay_ms": options.strategy.max_batch_delay,
        "kv_reservation": options.strategy.kv_reservation,
        "is_recorded": options.observers.record is not None,
        "proposer": proposer,
        "num_drafts": num_drafts,
    }


def _counters(stats: Stats) -> dict[str, object]:
    return {
        "generated_tokens": stats.num_generated_tokens,
        "preemptions": stats.num_swaps + stats.num_recomputes,
        "prefix_queries": stats.num_prefix_queries,
        "prefix_hits": stats.num_prefix_hits,
        "drafts": {
            total.name.partition(_DRAFTS)[2]: total.values
            for total in stats.totals
            if _DRAFTS in total.name
        },
    }


def _event(name: str, data: object) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(data))
