"""Builds an engine from options."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from core.configuration.options import Options
from core.errors import LongshoreError
from engine.attention.call import UnsupportedModelError
from engine.device import choose_device, use_expandable_segments, use_writable_kernel_cache
from engine.engine import Engine
from engine.group import Group
from engine.loading.model_source import NotKeptError
from engine.loading.open_model import make_source, read_config
from engine.phases import Phases
from engine.resolve import Resolved, resolve

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from engine.builders.packed import Lead
    from engine.loading.packed_model import PackedModel


def build_engine(
    model_dir: Path,
    options: Options,
    phases: Phases | None = None,
    on_lost: Callable[[LongshoreError], None] = lambda error: None,
    rank_address: str = "",
) -> Engine:
    """Load the model, choose the limits and check that a step runs.

    phases: the times of the start so far. on_lost: called with the error, in another thread, if
    one of several ranks is lost. The engine's next step then fails. On CUDA the step in flight may
    never end, because NCCL's kernels wait for the lost rank. rank_address: HOST:PORT at which ranks
    on other nodes (option.nodes) find rank 0.

    Raises ConfigurationError if the options and the model do not fit together.
    """
    phases = phases or Phases()
    device = choose_device(options.execution)
    build = partial(build_rank_0, model_dir, options, device, phases)
    if options.execution.tensor_parallel_degree is None and options.layout.nodes == 1:
        engine = build(Group(device), None)
    else:
        from engine.builders.lead import build_on_ranks

        engine = build_on_ranks(build, model_dir, options, device, phases, on_lost, rank_address)
    if options.observers.record is not None or options.observers.receipts:
        from engine.builders.observe import observe

        observe(engine, options)
    return engine


def build_rank_0(
    model_dir: Path,
    options: Options,
    device: torch.device,
    phases: Phases,
    group: Group,
    lead: Lead | None,
) -> Engine:
    """Build the engine, with this rank's part of the model. lead: None if there is one rank."""
    loaded = load(model_dir, options, device, phases, group)
    resolved, notes = loaded.resolved, loaded.notes
    if loaded.model is not None:
        from engine.builders.packed import build_packed

        return build_packed(resolved, loaded.model, phases, group, lead, notes)
    from engine.builders.library import build_library

    return build_library(resolved, phases, notes)


@dataclass(frozen=True, slots=True)
class Loaded:
    resolved: Resolved
    model: PackedModel | None
    """None if the library is to run the model, which is not loaded yet."""
    notes: tuple[str, ...]


def load(
    model_dir: Path, options: Options, device: torch.device, phases: Phases, group: Group
) -> Loaded:
    """Resolve the options, and load this process's part of the model.

    A group of several always gets a model. Raises ConfigurationError if the options and the
    model do not fit together.
    """
    from engine.loading.kept_config import keep_config, read_kept

    notes: tuple[str, ...] = ()
    if device.type == "cuda":
        use_expandable_segments()
        notes = use_writable_kernel_cache()
    read = partial(_load, model_dir, options, device, phases, group, notes)
    kept = read_kept(model_dir) if group.size == 1 else None
    if kept is not None:
        with suppress(NotKeptError):
            loaded = read(kept)
            if loaded.model is not None:
                return loaded
    config = read_config(model_dir, options.model.trust_remote_code)
    phases.end("config.json")
    loaded = read(config)
    decoder = loaded.model and loaded.model.own_decoder
    if decoder is not None and group.size == 1:
        keep_config(loaded.resolved.source, decoder.spec)
    return loaded


def _load(
    model_dir: Path,
    options: Options,
    device: torch.device,
    phases: Phases,
    group: Group,
    notes: tuple[str, ...],
    config: PreTrainedConfig,
) -> Loaded:
    """Do what `load` does, with this config. Raises NotKeptError if it has to be read again."""
    source = make_source(model_dir, config, options.model, options.execution, device)
    if not source.is_keepable:
        source.require_class()
    resolved = resolve(options, source, group.size)
    if resolved.executor == "packed":
        from engine.loading.packed_model import load_packed_model

        length = resolved.limits.max_model_len
        try:
            model = load_packed_model(source, length, resolved.decoder, phases, group)
            return Loaded(resolved, model, notes)
        except UnsupportedModelError as error:
            resolved = resolve(options, source, group.size, not_packed=str(error))
    return Loaded(resolved, None, notes)
