"""Gives an engine the observers that the options ask for."""

from __future__ import annotations

from pathlib import Path

import msgspec

from core.configuration.options import Options
from engine.engine import Engine
from engine.executor import Observer
from engine.observers.frames import VERSION, Header
from engine.observers.ledger import Ledger, joined
from engine.observers.recorder import Recorder, link_tokens
from engine.observers.store import RecordingWriter


def observe(engine: Engine, options: Options) -> None:
    """Record and account for what an engine does from now on, as the options say.

    Raises ConfigurationError if the folder of option.record cannot be written.
    """
    observers: list[Observer] = []
    if options.observers.record is not None:
        observers.append(_recorder(engine, options, Path(options.observers.record)))
    if options.observers.receipts:
        ledger = Ledger(engine.strategy)
        observers.append(ledger)
        engine.features = (*engine.features, ledger)
        engine.facts = msgspec.structs.replace(engine.facts, gives_receipts=True)
    if observers:
        engine.observer = joined(observers)


def _recorder(engine: Engine, options: Options, folder: Path) -> Recorder:
    writer = RecordingWriter(
        folder,
        header_of(engine),
        options.observers.record_max_mib * 2**20,
        options.observers.record_max_hours * 3600,
    )
    end_engine = engine.close

    def close() -> None:
        writer.close()
        end_engine()

    engine.close = close
    return Recorder(
        engine.strategy,
        lambda frames: writer.write(frames, is_idle=not engine.has_work()),
        model_time=engine.model_time,
    )


def header_of(engine: Engine) -> Header:
    assert engine.settings is not None, "builders give an engine the settings"
    return Header(
        VERSION,
        engine.settings,
        engine.facts.executor,
        engine.overlaps,
        engine.strategy.extension is not None,
        link_tokens(engine.strategy),
        engine.facts.weights_bytes,
        number=0,
        is_idle=True,
    )
