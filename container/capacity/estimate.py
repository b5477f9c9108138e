"""Estimates how many requests fit into an instance's GPU memory: `longshore plan`.

Uses the engine's own arithmetic (`core.configuration.sizing`). Estimates what the engine measures
at start-up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from container.capacity.decoder import DTYPE_BYTES, Decoder
from container.capacity.instances import Instance
from container.capacity.placement import place
from core.configuration.batching import checkpoint_limit, packed_limits, state_limit
from core.configuration.kv_layout import LENGTHS, KVLayout, bytes_per_block, plan_layout
from core.configuration.options import Options
from core.configuration.record import Reserved
from core.configuration.sizing import fit_length, gpu_kv_budget, length_limit, reserved_tokens
from core.configuration.step_size import StepSize, graph_sizes, largest_of
from core.configuration.strategy_table import (
    BATCHING_NAMES,
    DEFAULT_FOR_PACKED,
    STRATEGIES,
    Batching,
)
from core.errors import ConfigurationError
from core.states.room import StateSlots, num_draft_states, num_spare_states

CONTEXT_BYTES = 600 * 2**20
"""CUDA's context and its libraries' workspaces: an assumption, not yet measured."""
LONGEST = 262144
"""The longest context for which a plan says what a sequence holds."""
SAMPLER_BYTES = 64
"""Bytes per logit in a step that samples with top-p, measured on a CPU."""


@dataclass(frozen=True, slots=True)
class TypicalRequest:
    """A typical request; lengths in tokens."""

    prompt: int
    answer: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """The memory that one batching strategy has."""

    batching: Batching
    activation_bytes: int
    num_blocks: int
    block_bytes: int
    max_model_len: int
    max_concurrent: int
    """How many requests of the typical length run at the same time."""
    num_spare_states: int
    """States after drafts, if layers keep a state."""
    num_checkpoints: int
    """States of cached prefixes, if layers keep a state."""
    num_host_checkpoints: int
    """More of them, in the host's memory."""
    notes: tuple[str, ...]
    draft_block_bytes: int
    """What is kept for a draft model or a head beside each block."""
    num_draft_states: int
    """States that a draft model keeps."""


def make_estimate(
    decoder: Decoder,
    instance: Instance,
    options: Options,
    batching: Batching,
    request: TypicalRequest,
) -> Estimate:
    """Estimate the memory of one strategy. Raises ConfigurationError if the model does not fit."""
    placement = place(decoder, instance, options)
    decoder = placement.part
    limits = packed_limits(options, batching, "cuda", decoder.max_length)
    budget_tokens, max_sequences = limits.max_step_tokens, limits.max_sequences
    activations = _step_bytes(decoder, budget_tokens, max_sequences)
    method, num_drafts = options.speculation.chosen
    num_drafts = 0 if method is None else num_drafts
    if not options.execution.enforce_eager:
        sizes = graph_sizes(
            max_sequences,
            budget_tokens,
            options.execution.graph_prompt_sizes,
            0 if decoder.states else num_drafts,
        )
        activations += _graph_bytes(decoder, sizes)
    itemsize = kv_itemsize(decoder, options)
    layout = plan_layout(
        decoder.shapes,
        options.memory.block_size,
        itemsize,
        limits.max_model_len,
        2 * budget_tokens,
    )
    block_bytes = layout.block_bytes
    used = loaded_bytes(decoder, options) + CONTEXT_BYTES
    budget = gpu_kv_budget(options.memory, instance.gpu_mib * 2**20, used, activations)
    draft_bytes = draft_block_bytes(decoder, options, layout)
    blocks_of_longest = layout.blocks_for(limits.max_model_len)
    num_of_draft = _num_draft_states(decoder, max_sequences, budget)
    if decoder.draft is not None:
        budget -= num_of_draft * decoder.draft.row_bytes
    num_spare = num_checkpoints = num_host_checkpoints = 0
    if decoder.states:
        num_spare = num_spare_states(num_drafts, max_sequences)
        slots = StateSlots(decoder.state_bytes, state_limit(max_sequences), num_spare)
        most = slots.share(budget, blocks_of_longest * (block_bytes + draft_bytes))
        slots = slots.within(most)
        max_sequences = min(max_sequences, slots.num_running)
        num_wanted = checkpoint_limit(options.memory, batching, max_sequences)
        num_checkpoints = min(num_wanted, slots.num_besides(most))
        num_spare = slots.num_spare
        budget -= slots.num_bytes + num_checkpoints * decoder.state_bytes
        if num_checkpoints and options.memory.state_checkpoints is not None:
            most_swapped = placement.swap_bytes(options.memory)
            most = slots.share(most_swapped, blocks_of_longest * block_bytes)
            num_host_checkpoints = min(num_wanted - num_checkpoints, most // decoder.state_bytes)
    usable = max_sequences * blocks_of_longest
    num_blocks = min(usable, budget // (block_bytes + draft_bytes))
    if options.memory.num_kv_blocks is not None:
        num_blocks = layout.num_blocks(decoder.shapes, options.memory.num_kv_blocks, itemsize)
    if num_blocks <= 0:
        draft = decoder.draft
        of_draft = "" if draft is None else f"the {draft.what} ({_size(draft.weights_bytes)}), "
        raise ConfigurationError(
            f"{decoder.name} does not fit: the weights ({_size(decoder.weights_bytes)}), "
            f"{of_draft}steps and CUDA use up {options.memory.gpu_memory_utilization:.0%} of the "
            f"{instance.gpu}'s {_size(instance.gpu_mib * 2**20)}{placement.advice()}"
        )
    longest = layout.longest(num_blocks, limits.max_model_len)
    max_len, notes = fit_length(options.memory, limits.max_model_len, longest)
    reserved = _tokens_reserved(options, batching, request, max_len)
    # A request that decodes under `paged` holds no more than its windows.
    running = replace(layout, step_tokens=1) if STRATEGIES[batching].is_paged else layout
    max_concurrent = min(max_sequences, num_blocks // running.blocks_for(reserved))
    return Estimate(
        batching,
        activations,
        num_blocks,
        block_bytes,
        max_len,
        max_concurrent,
        num_spare,
        num_checkpoints,
        num_host_checkpoints,
        notes,
        draft_bytes,
        num_of_draft,
    )


def plan_lines(
    decoder: Decoder, instance: Instance, options: Options, request: TypicalRequest
) -> Iterator[str]:
    """Yield the lines of the plan for all strategies.

    Raises ConfigurationError if the model does not fit.
    """
    plans = [
        make_estimate(decoder, instance, options, batching, request) for batching in BATCHING_NAMES
    ]
    paged = next(plan for plan in plans if plan.batching == DEFAULT_FOR_PACKED)
    count = f"{instance.num_gpus} x " if instance.num_gpus > 1 else ""
    placement = place(decoder, instance, options)
    used = f" (the model uses {placement.num_gpus} of them)" if instance.num_gpus > 1 else ""
    yield f"{decoder.name} on {instance.name}: {count}{instance.gpu}{used}"
    yield from placement.lines()
    how = "" if decoder.is_counted else ", computed from config.json"
    yield (
        f"  weights: {_size(decoder.weights_bytes)}, "
        f"{decoder.num_parameters / 1e6:,.0f} million parameters in {decoder.weights_format}{how}"
    )
    decoder = placement.part
    if placement.is_divided:
        yield f"  on each GPU, like all figures below: weights {_size(decoder.weights_bytes)}"
    for item, num_bytes in reserved_bytes(decoder, options).items():
        yield f"  {item.what}: {_size(num_bytes)} for {item.key}"
    if (draft := decoder.draft) is not None:
        kept = f"{_size(paged.draft_block_bytes)} of KV{' and states' * bool(draft.state_bytes)}"
        rows = paged.num_draft_states
        of_rows = f", {_size(rows * draft.row_bytes)} for {rows} states" * (rows > 0)
        yield (
            f"  {draft.what}{' on the first GPU' * placement.is_divided}: weights "
            f"{_size(draft.weights_bytes)}, {kept} beside each block{of_rows} ({draft.name})"
        )
    share = options.memory.gpu_memory_utilization
    usable = int(instance.gpu_mib * 2**20 * share)
    yield f"  usable: {_size(usable)}, {share:.0%} of the GPU's memory"
    yield (
        f"  overhead: about {_size(paged.activation_bytes)} for steps and {_size(CONTEXT_BYTES)} "
        "for CUDA (estimates; the engine measures both when it starts)"
    )
    yield (
        f"  KV: blocks of {options.memory.block_size} tokens, {_size(paged.block_bytes)} each; "
        f"at most {paged.max_model_len} tokens per sequence"
    )
    if decoder.states:
        count, on_host = paged.num_checkpoints, paged.num_host_checkpoints
        more = f" and {_size(on_host * decoder.state_bytes)} of host memory for {on_host}"
        spare = paged.num_spare_states * decoder.state_bytes
        of_drafts = f", {_size(spare)} for drafts" if spare else ""
        yield (
            f"  state: {_size(decoder.state_bytes)} of each running request, beside its KV"
            f"{of_drafts}; with "
            f"{DEFAULT_FOR_PACKED}, {_size(count * decoder.state_bytes)} more for {count}"
            f"{more * (on_host > 0)} checkpoints of cached prefixes"
        )
    yield from length_lines(decoder, options, paged.num_blocks * paged.block_bytes)
    yield f"  concurrent requests{placement.of_each} of {request.prompt} + {request.answer} tokens:"
    for plan in plans:
        memory = f"{plan.num_blocks} blocks, {_size(plan.num_blocks * plan.block_bytes)}"
        yield f"    {plan.batching:<10}  {plan.max_concurrent:>4}  ({memory})"
    yield from (f"  note: {note}" for note in paged.notes)


def length_lines(decoder: Decoder, options: Options, kv_bytes: int) -> Iterator[str]:
    """Yield what sequences hold of the KV memory, by length, and how many of their tokens fit."""
    longest, itemsize = (
        length_limit(options.memory, decoder.max_length),
        kv_itemsize(decoder, options),
    )
    yield f"  sequences that fit into {_size(kv_bytes)} of KV, if they decode and share no prefix:"
    state = f", and {_size(decoder.state_bytes)} of state" if decoder.states else ""
    for length in (length for length in (*LENGTHS, LONGEST) if length <= longest):
        layout = plan_layout(decoder.shapes, options.memory.block_size, itemsize, longest, 1)
        held = layout.blocks_for(length) * layout.block_bytes
        whole = bytes_per_block(decoder.unfreed_shapes, length, itemsize)
        line = f"    {length:>6} tokens  {_fitting(length, held, kv_bytes)}{state}"
        if whole > held:
            line += f"; if all K and V were kept, {_fitting(length, whole, kv_bytes)}"
        yield line


def _fitting(length: int, held: int, kv_bytes: int) -> str:
    """Say how many sequences fit that have `length` tokens and hold `held` bytes each."""
    count = kv_bytes // held
    return f"{_size(held)} each, {count:,} of them, {count * length:,} tokens"


def loaded_bytes(decoder: Decoder, options: Options) -> int:
    """Return the bytes of the weights, and of what options load or reserve beside them."""
    of_draft = 0 if decoder.draft is None else decoder.draft.weights_bytes
    return decoder.weights_bytes + of_draft + sum(reserved_bytes(decoder, options).values())


def draft_block_bytes(decoder: Decoder, options: Options, layout: KVLayout) -> int:
    """Return the bytes that are kept for drafts beside each block of the decoder; 0 without any.

    Hidden states lie beside blocks of tokens that no window leaves.
    """
    draft = decoder.draft
    if draft is None:
        return 0
    itemsize = kv_itemsize(decoder, options)
    kept = next((group.block_size for group in layout.groups if group.window is None), 0)
    of_kv = bytes_per_block(draft.shapes, options.memory.block_size, itemsize)
    return of_kv + kept * draft.state_bytes


def _num_draft_states(decoder: Decoder, max_sequences: int, budget: int) -> int:
    """Return how many states a draft model keeps, if its layers keep any."""
    if decoder.draft is None or not decoder.draft.row_bytes:
        return 0
    return num_draft_states(max_sequences, decoder.draft.row_bytes, budget)


def reserved_bytes(decoder: Decoder, options: Options) -> dict[Reserved, int]:
    """Return the bytes that options reserve."""
    reserved = options.reserved(decoder.linear_width)
    return {item: item.num_elements * DTYPE_BYTES[decoder.dtype] for item in reserved}


def _tokens_reserved(
    options: Options, batching: Batching, request: TypicalRequest, max_len: int
) -> int:
    """Return the token slots that a request reserves or, if paged, holds when it finishes."""
    policy = (
        options.strategy.kv_reservation if STRATEGIES[batching].has_kv_reservation else "oracle"
    )
    return min(reserved_tokens(policy, request.prompt, request.answer, max_len), max_len)


def _step_bytes(decoder: Decoder, num_tokens: int, num_sequences: int) -> int:
    """Return the peak memory of a step: that of a layer's activations or of the sampled logits,
    whichever is larger."""
    sampled = num_sequences * decoder.vocab_size * SAMPLER_BYTES
    return max(_layer_bytes(decoder, num_tokens), sampled)


def _graph_bytes(decoder: Decoder, sizes: Sequence[StepSize]) -> int:
    """Return the memory of the CUDA graphs: that of the largest graph's forward pass, and fp32
    logits."""
    num_logits = max(size.num_rows for size in sizes) * decoder.vocab_size
    logits_bytes = num_logits * DTYPE_BYTES[decoder.dtype]
    layer_bytes = _layer_bytes(decoder, largest_of(sizes).num_tokens)
    return max(layer_bytes, logits_bytes) + num_logits * DTYPE_BYTES["fp32"]


def _layer_bytes(decoder: Decoder, num_tokens: int) -> int:
    """Return the activations of one layer: residual, norm and the widest part."""
    return num_tokens * decoder.activation_width * DTYPE_BYTES[decoder.dtype]


def kv_itemsize(decoder: Decoder, options: Options) -> int:
    """Return the bytes of one element of the KV cache."""
    return DTYPE_BYTES[decoder.dtype] if options.memory.kv_cache_dtype == "auto" else 1


def _size(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB" if size >= 2**20 else f"{size / 2**10:,.1f} KiB"
