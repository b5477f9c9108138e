"""Loads a head that belongs to the model, and builds what proposes its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from core.configuration.kv_layout import KVLayout, bytes_per_block
from core.errors import ConfigurationError
from engine.attention.call import UnsupportedModelError
from engine.attention.kv_cache import KVCache
from engine.builders.drafting import Drafting
from engine.group import Group
from engine.loading.model_source import ModelSource, has_language_model
from engine.loading.open_model import read_config
from engine.loading.own_decoder import load_ends, make_loader
from engine.loading.packed_model import PackedModel
from engine.model.decoder import Decoder
from engine.phases import Phases
from engine.resolve import Capacity, Resolved
from engine.sampling.rows import Stage
from engine.speculation.draft_model import DraftModel
from engine.speculation.heads.head import Head, RowsColumn
from engine.speculation.heads.hidden_states import (
    Fusion,
    HiddenStates,
    HiddenStatesColumn,
    OthersStatesColumn,
    keeping_group,
)
from engine.speculation.heads.mtp import load_mtp
from engine.speculation.heads.proposer import HeadProposer
from strategies.memory.base import KVMemory

KEY = "option.speculative_method"


@dataclass(slots=True)
class LoadedHead(Drafting):
    head: Head
    fusion: Fusion | None
    """See `HiddenStatesColumn`."""
    dtype: torch.dtype

    @property
    def identity(self) -> tuple[object, ...]:
        return self.name, self.weights_bytes, self.dtype

    def bytes_beside(self, layout: KVLayout) -> int:
        group = layout.groups[keeping_group(layout.groups)]
        return group.block_size * self.head.width * self.dtype.itemsize

    def attach(self, model: PackedModel, cache: KVCache) -> None:
        self.head.states = HiddenStates(cache, self.head.width, self.dtype)
        model.columns.append(HiddenStatesColumn(self.head.states, self.fusion))

    def build(
        self,
        resolved: Resolved,
        capacity: Capacity,
        memory: KVMemory,
        stages: Sequence[Stage[Any]],
    ) -> DraftModel:
        longest, columns = capacity.max_model_len, [RowsColumn()]
        settings = self.allocated(self.head, longest, resolved, capacity, stages, columns)
        return HeadProposer(self.head, memory, settings)


def load_head(resolved: Resolved, model: PackedModel, phases: Phases, group: Group) -> LoadedHead:
    """Load the head. Raises ConfigurationError if the model cannot run with one, or has none."""
    assert resolved.speculation is not None, "drafts are wanted"
    method, decoder = resolved.speculation.chosen[0], model.own_decoder
    if decoder is None:
        raise ConfigurationError(
            f"{KEY}={method} needs Longshore's own layers, but the model runs with "
            f"{model.description}; choose another method"
        )
    weights_bytes = 0
    with torch.inference_mode():
        if group.size > 1:
            # This process has only a part of the model's, and computes drafts alone.
            decoder = load_ends(_text_source(resolved.source), decoder.spec)
            weights_bytes = decoder.num_bytes
        loaded = _load_mtp if method == "mtp" else _load_eagle3
        name, head, fusion, own_bytes = loaded(resolved, decoder)
    phases.end("head")
    block_bytes = bytes_per_block(
        head.shapes, resolved.memory.block_size, resolved.kv_dtype.itemsize
    )
    return LoadedHead(name, weights_bytes + own_bytes, block_bytes, head, fusion, model.dtype)


def follow_head(resolved: Resolved, model: PackedModel) -> None:
    """Have a model's steps compute the rows that they compute where the head is."""
    assert resolved.speculation is not None, "drafts are wanted"
    is_fused = resolved.speculation.chosen[0] == "eagle3"
    model.columns.append(OthersStatesColumn(is_fused=is_fused))


_Loaded = tuple[str, Head, Fusion | None, int]
"""A name for notes, the head, how its states are made, and the bytes of its weights."""


def _text_source(source: ModelSource) -> ModelSource:
    return source.of_language_model() if has_language_model(source.config) else source


def _load_mtp(resolved: Resolved, decoder: Decoder) -> _Loaded:
    source = resolved.source
    if source.is_dummy:
        raise ConfigurationError(
            f"{KEY}=mtp: option.load_format=dummy makes no weights of such a layer; leave one of "
            "the options out"
        )
    group = Group(source.device)
    make = partial(make_loader, source=_text_source(source), spec=decoder.spec, group=group)
    head, weights_bytes = load_mtp(decoder, source.model_dir, make)
    return "", head, None, weights_bytes


def _load_eagle3(resolved: Resolved, decoder: Decoder) -> _Loaded:
    from engine.builders.draft import check_vocabulary, draft_directory
    from engine.speculation.heads.eagle3 import load_eagle3

    source = resolved.source
    assert resolved.speculation is not None, "drafts are wanted"
    assert resolved.speculation.draft_model is not None, "the method needs one"
    directory = draft_directory(resolved.speculation.draft_model, source)
    config = read_config(directory, source.trust_remote_code)
    check_vocabulary(source, config, directory)
    try:
        head, fusion, weights_bytes = load_eagle3(decoder, directory, config, source.dtype)
    except UnsupportedModelError as error:
        raise ConfigurationError(
            f"option.speculative_draft_model={directory}: {error}; choose another head"
        ) from error
    return directory.name, head, fusion, weights_bytes
