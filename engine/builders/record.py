"""Records what an engine does, if option.record asks for it."""

from __future__ import annotations

from pathlib import Path

from core.configuration.options import Options
from engine.engine import Engine
from engine.observers.frames import VERSION, Header
from engine.observers.recorder import Recorder, link_tokens
from engine.observers.store import RecordingWriter
from strategies.factory import StrategySettings


def record(engine: Engine, options: Options) -> None:
    """Record what an engine does from now on, in the folder of option.record.

    Raises ConfigurationError if the folder cannot be written.
    """
    assert options.observers.record is not None
    writer = RecordingWriter(
        Path(options.observers.record),
        header_of(engine, settings_of(engine, options)),
        options.observers.record_max_mib * 2**20,
        options.observers.record_max_hours * 3600,
    )
    end_engine = engine.close

    def close() -> None:
        writer.close()
        end_engine()

    engine.close = close
    engine.observer = Recorder(
        engine.strategy,
        lambda frames: writer.write(frames, is_idle=not engine.has_work()),
        model_time=engine.model_time,
    )


def header_of(engine: Engine, settings: StrategySettings) -> Header:
    return Header(
        VERSION,
        settings,
        engine.facts.executor,
        engine.overlaps,
        engine.strategy.extension is not None,
        link_tokens(engine.strategy),
        engine.facts.weights_bytes,
        number=0,
        is_idle=True,
    )


def settings_of(engine: Engine, options: Options) -> StrategySettings:
    """Return the settings from which the engine's strategy was made."""
    facts, memory = engine.facts, engine.strategy.memory
    return StrategySettings(
        batching=facts.batching,
        num_blocks=memory.num_blocks,
        layout=memory.layout,
        max_model_len=facts.max_model_len,
        limits=engine.strategy.limits,
        max_delay_s=options.strategy.max_batch_delay / 1000,
        kv_reservation=options.strategy.kv_reservation,
        enable_prefix_caching=options.memory.enable_prefix_caching,
        preemption_mode=options.memory.preemption_mode,
        num_swap_blocks=facts.num_swap_blocks,
    )
