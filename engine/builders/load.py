"""Resolves the options, and loads the model if the packed executor runs it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from core.configuration.options import Options
from engine.attention.call import UnsupportedModelError
from engine.device import use_expandable_segments, use_writable_kernel_cache
from engine.group import Group
from engine.loading.open_model import make_source, read_config
from engine.phases import Phases
from engine.resolve import Resolved, resolve

if TYPE_CHECKING:
    from engine.loading.packed_model import PackedModel


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
    notes: tuple[str, ...] = ()
    if device.type == "cuda":
        use_expandable_segments()
        notes = use_writable_kernel_cache()
    config = read_config(model_dir, options.model.trust_remote_code)
    source = make_source(model_dir, config, options.model, options.execution, device)
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
