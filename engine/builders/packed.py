"""Builds an engine for the packed executor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from core.configuration.options import LoraOptions
from core.errors import ConfigurationError
from core.part import Feature
from core.plan import BlockMoves, StepPlan
from engine.attention.backends import AttentionBackend, CpuBackend, make_backend
from engine.attention.kv_cache import KVCache
from engine.builders.common import (
    BITS,
    BITS_OF_TRANSFORMERS,
    check_steps,
    decode_step,
    eos_token_ids,
    prompt_step,
    sampling_stages,
    text_features,
)
from engine.engine import Engine
from engine.group import Group, SharedFeature
from engine.loading.model_source import ModelSource
from engine.loading.packed_model import PackedModel
from engine.memory.capacity import Beside, measure
from engine.model.linear import uses_panels
from engine.phases import Phases
from engine.resolve import Capacity, Resolved, facts_of, strategy_settings
from engine.sampling.grammars import Grammars
from engine.sampling.sampler import Sampler
from engine.scores.column import ScoreColumn
from engine.staging import Staging
from engine.step.beam_candidates import BeamColumn
from engine.step.column import Column, PerTokenColumn, RepeatableColumn
from engine.step.packed_executor import PackedExecutor
from engine.step.passes import Passes, Runner
from strategies.factory import make_strategy

if TYPE_CHECKING:
    from engine.builders.drafting import Drafting


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedParts:
    """What runs a packed model's steps, besides the model."""

    capacity: Capacity
    columns: Sequence[PerTokenColumn | RepeatableColumn]
    """Those in which all processes of the group take part."""
    passes: Passes
    features: tuple[SharedFeature, ...]
    """Those with weights of their own."""
    notes: tuple[str, ...]


Lead = Callable[[PackedParts], Runner]
"""Returns what runs the steps of these parts."""


def build_packed(
    resolved: Resolved,
    model: PackedModel,
    phases: Phases,
    group: Group,
    lead: Lead | None,
    notes: tuple[str, ...],
) -> Engine:
    """Allocate the KV cache, capture the graphs and check that a step runs.

    lead: makes the others of the group do what this process does. notes: those of the start so far.
    """
    draft = _load_draft(resolved, model, phases, group)
    parts = build_parts(resolved, model, phases, group, draft)
    eos = eos_token_ids(resolved.source)
    grammars = Grammars(resolved.source.model_dir, eos)
    settings = strategy_settings(resolved, parts.capacity)
    strategy = make_strategy(settings)
    features: list[Feature] = [*text_features(grammars), *parts.features]
    columns: list[Column] = [
        ScoreColumn(model.device),
        BeamColumn(),
        *parts.columns,
    ]
    speculative: Speculative | None = None
    if resolved.speculation is not None:
        from engine.speculation.start import Speculative

        sampler = Sampler(Staging(model.device), sampling_stages(grammars))
        stages = sampling_stages(grammars)
        proposer = draft and draft.build(resolved, parts.capacity, strategy.memory, stages)
        speculative = Speculative(
            resolved.speculation, strategy, sampler, proposer, overlaps=resolved.overlaps
        )
        features.append(speculative)
        columns.append(speculative.column)
    executor = PackedExecutor(
        parts.passes,
        Sampler(Staging(model.device), sampling_stages(grammars)),
        columns,
        None if lead is None else lead(parts),
        overlaps=resolved.overlaps,
    )
    check_steps(executor, _first_steps(parts.passes.cache))
    phases.end("first steps")
    if speculative is not None:
        vocab_size = resolved.source.config.get_text_config().vocab_size
        length = parts.capacity.max_model_len
        directory, key = resolved.source.model_dir, _costs_key(resolved, model, parts, draft)
        note = speculative.measure(executor, length, vocab_size, directory, key)
        notes += (note, *speculative.notes)
        phases.end("times of steps")
    return Engine(
        strategy,
        executor,
        facts_of(resolved, parts.capacity, model, eos, phases, notes + parts.notes),
        overlaps=resolved.overlaps,
        features=tuple(features),
        model_time=executor.model_time,
        settings=settings,
    )


def _load_draft(
    resolved: Resolved, model: PackedModel, phases: Phases, group: Group
) -> Drafting | None:
    """Load the model or the head that drafts, if the options ask for one. Rank 0 has all of it."""
    speculation = resolved.speculation
    if speculation is None or not speculation.has_weights:
        return None
    if speculation.has_head:
        from engine.builders.head import load_head

        return load_head(resolved, model, phases, group)
    from engine.builders.draft import load_draft

    return load_draft(resolved, phases)


def _costs_key(
    resolved: Resolved, model: PackedModel, parts: PackedParts, draft: Drafting | None
) -> Callable[[], str]:
    from engine.builders.costs_key import costs_key

    return lambda: costs_key(resolved, model, parts.capacity, draft)


def build_parts(
    resolved: Resolved,
    model: PackedModel,
    phases: Phases,
    group: Group,
    draft: Drafting | None = None,
) -> PackedParts:
    """Build what every process of the group has. The limits are the same in all of them.

    draft: what only this process has, and makes room for.
    """
    block_size, kv_dtype = resolved.memory.block_size, resolved.kv_dtype
    features, feature_notes = _start_features(resolved.lora, resolved.source, model)
    beside = Beside()
    if model.states:
        from engine.memory.state_room import StateRoom

        beside = StateRoom(model, resolved, group)
    if draft is not None:
        beside.use = draft
    capacity = measure(resolved, model, group, beside)
    backend, backend_notes = make_backend(
        model.device,
        model.shapes,
        block_size,
        capacity.max_model_len,
        kv_dtype,
        in_segments=resolved.source.is_pinned,
    )
    cache = KVCache(
        model.shapes,
        capacity.num_blocks,
        capacity.layout,
        kv_dtype,
        model.device,
        capacity.num_swap_blocks,
        beside.pool(),
        beside.use.bytes_beside(capacity.layout),
    )
    if draft is not None:
        draft.attach(model, cache)
    elif group.rank and resolved.speculation is not None and resolved.speculation.has_head:
        from engine.builders.head import follow_head

        follow_head(resolved, model)
    phases.end("K and V")
    graphs, graph_notes = None, ()
    if resolved.graph_prompt_sizes is not None and beside.why_no_graphs:
        graph_notes = (f"steps run without CUDA graphs: {beside.why_no_graphs}",)
    elif resolved.graph_prompt_sizes is not None:
        from engine.builders.graphs import capture

        graphs, graph_notes = capture(model, cache, backend, resolved, capacity, group)
    if graphs is not None:
        phases.end(f"{len(graphs)} CUDA graphs")
    notes = feature_notes + resolved.source.notes + capacity.notes + backend_notes + graph_notes
    notes += _notes_on_bits(
        model, backend, group, beside.why_bits_vary, is_promised=resolved.source.is_batch_invariant
    )
    passes = Passes(model, cache, backend, graphs)
    return PackedParts(
        capacity=capacity,
        columns=(*model.shared_columns(passes.model_time), *beside.columns()),
        passes=passes,
        features=features,
        notes=notes,
    )


def _notes_on_bits(
    model: PackedModel,
    backend: AttentionBackend,
    group: Group,
    why: str,
    *,
    is_promised: bool,
) -> tuple[str, ...]:
    """Say why answers may depend on the batch, if they may on this CPU (docs/same-bits.md).

    why: why they do on this device, whatever the options say. is_promised: whether
    option.batch_invariant is true. Raises ConfigurationError if that cannot be kept.
    """
    is_cpu = model.device.type == "cpu"
    notes = _exceptions_on_cpus(model, backend, group) if is_cpu else ()
    if why and not notes and (is_cpu or is_promised):
        notes = (f"{BITS}: {why}",)
    if not is_promised:
        return notes
    if notes:
        raise ConfigurationError(
            f"option.batch_invariant=true: {notes[0]} (docs/same-bits.md); leave the option out"
        )
    always = ", as always on CPUs" if is_cpu else ""
    return (f"the bits of an answer do not depend on its batch{always}",)


def _exceptions_on_cpus(
    model: PackedModel, backend: AttentionBackend, group: Group
) -> tuple[str, ...]:
    if not model.description.startswith("own"):
        return (BITS_OF_TRANSFORMERS,)
    if not uses_panels(model.device, model.dtype):
        reason = f"torch multiplies {str(model.dtype).removeprefix('torch.')} on this machine"
    elif not isinstance(backend, CpuBackend):
        reason = "torch computes the attention"
    else:
        reason = group.why_sums_vary
    return (f"{BITS}: {reason}",) if reason else ()


def _start_features(
    lora: LoraOptions | None, source: ModelSource, model: PackedModel
) -> tuple[tuple[SharedFeature, ...], tuple[str, ...]]:
    """Reserve memory for features that are on, and load what they have on disk. Return notes, too.

    Sequences that use them get a column of the model.
    """
    if lora is None:
        return (), ()
    from engine.lora.start import start_adapters

    adapters, note = start_adapters(model, source.model_dir, lora, is_pinned=source.is_pinned)
    return (adapters,), (note,)


def _first_steps(cache: KVCache) -> list[StepPlan]:
    """Return a prompt, and a decode step with every kind of block move that may happen."""
    swaps = ((0, 0),) if len(cache.host) else ()
    copies = ((0, 1),) if len(cache.blocks[0]) > 1 else ()
    moves = BlockMoves(swaps, swaps, copies)
    return [prompt_step(cache.groups), decode_step(cache.groups, moves)]
