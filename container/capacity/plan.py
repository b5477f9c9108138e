"""What a model would have of an instance's GPU: `python -m container plan`.

The engine's own arithmetic (`core.sizing`), with what the engine measures at start estimated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from container.capacity.decoder import DTYPE_BYTES, Decoder
from container.capacity.instances import Instance
from core.errors import ConfigurationError
from core.options import BATCHING_NAMES, Batching, Options
from core.sizing import (
    blocks_for,
    bytes_per_block,
    fit_length,
    gpu_kv_budget,
    length_limit,
    sequence_limit,
    step_token_budget,
)

CONTEXT_BYTES = 600 * 2**20
"""Of CUDA itself, its libraries' workspaces and the graphs: an assumption, not measured yet."""
SAMPLER_BYTES = 64
"""Per logit of a step that draws with top-p, counted on a CPU."""


@dataclass(frozen=True, slots=True)
class Request:
    """A typical one, in tokens."""

    prompt: int
    answer: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Of one strategy."""

    batching: Batching
    activation_bytes: int
    num_blocks: int
    block_bytes: int
    max_model_len: int
    at_once: int
    """Requests of the typical length that run together."""
    notes: tuple[str, ...]


def make_plan(
    decoder: Decoder, instance: Instance, options: Options, batching: Batching, request: Request
) -> Plan:
    """Raises ConfigurationError where the model does not fit."""
    budget_tokens = step_token_budget(options, "cuda")
    max_sequences = min(sequence_limit(options, batching), budget_tokens)
    max_len = length_limit(options, decoder.max_length)
    activations = sum(
        _step_bytes(decoder, num_tokens, max_sequences)
        for num_tokens in (budget_tokens, max_sequences)
    )
    block_bytes = bytes_per_block(decoder.shapes, options.block_size, kv_itemsize(decoder, options))
    used = weights_bytes(decoder) + adapter_bytes(decoder, options) + CONTEXT_BYTES
    budget = gpu_kv_budget(options, instance.gpu_mib * 2**20, used, activations)
    usable = max_sequences * blocks_for(max_len, options.block_size)
    num_blocks = options.num_kv_blocks or min(usable, budget // block_bytes)
    if num_blocks == 0:
        raise ConfigurationError(
            f"{decoder.name} does not fit: weights of {_mib(weights_bytes(decoder))}, steps and "
            f"CUDA leave nothing of {options.gpu_memory_utilization:.0%} of the {instance.gpu}'s "
            f"{_mib(instance.gpu_mib * 2**20)}"
        )
    max_len, notes = fit_length(options, max_len, num_blocks * options.block_size)
    reserved = _tokens_held(options, batching, request, max_len)
    at_once = min(max_sequences, num_blocks // blocks_for(reserved, options.block_size))
    return Plan(batching, activations, num_blocks, block_bytes, max_len, at_once, notes)


def plan_lines(
    decoder: Decoder, instance: Instance, options: Options, request: Request
) -> Iterator[str]:
    """The plan of all four strategies. Raises ConfigurationError where the model does not fit."""
    plans = [
        make_plan(decoder, instance, options, batching, request) for batching in BATCHING_NAMES
    ]
    paged = plans[-1]
    count = f"{instance.num_gpus} x " if instance.num_gpus > 1 else ""
    used = " (a model runs on one of them)" if instance.num_gpus > 1 else ""
    yield f"{decoder.name} on {instance.name}: {count}{instance.gpu}{used}"
    how = "" if decoder.is_counted else ", computed from config.json"
    yield (
        f"  weights: {_mib(weights_bytes(decoder))}, "
        f"{decoder.num_parameters / 1e6:,.0f} million numbers in {decoder.dtype}{how}"
    )
    if options.enable_lora:
        yield f"  adapters: {_mib(adapter_bytes(decoder, options))} for option.max_loras"
    usable = int(instance.gpu_mib * 2**20 * options.gpu_memory_utilization)
    yield f"  usable: {_mib(usable)}, {options.gpu_memory_utilization:.0%} of the GPU's memory"
    yield (
        f"  besides: about {_mib(paged.activation_bytes)} for steps and {_mib(CONTEXT_BYTES)} for "
        "CUDA (estimates; the engine measures both when it starts)"
    )
    yield (
        f"  KV: blocks of {options.block_size} tokens, {_mib(paged.block_bytes)} each; "
        f"sequences of {paged.max_model_len} tokens at most"
    )
    yield f"  requests of {request.prompt} + {request.answer} tokens at once:"
    for plan in plans:
        memory = f"{plan.num_blocks} blocks, {_mib(plan.num_blocks * plan.block_bytes)}"
        yield f"    {plan.batching:<10}  {plan.at_once:>4}  ({memory})"
    yield from (f"  note: {note}" for note in paged.notes)


def weights_bytes(decoder: Decoder) -> int:
    return decoder.num_parameters * DTYPE_BYTES[decoder.dtype]


def adapter_bytes(decoder: Decoder, options: Options) -> int:
    """Of the slots for LoRA adapters, where the linear layers are those of a Llama."""
    if not options.enable_lora:
        return 0
    hidden, inner = decoder.hidden_size, decoder.intermediate_size
    queries, keys = (num * decoder.head_dim for num in (decoder.num_heads, decoder.num_kv_heads))
    widths = 2 * (hidden + queries) + 2 * (hidden + keys) + 3 * (hidden + inner)
    num_columns = options.max_loras * options.max_lora_rank
    return decoder.num_layers * num_columns * widths * DTYPE_BYTES[decoder.dtype]


def _tokens_held(options: Options, batching: Batching, request: Request, max_len: int) -> int:
    """For one request: reserved by the strategy or, paged, held when the answer ends."""
    whole = min(request.prompt + request.answer, max_len)
    if batching != "continuous" or options.kv_reservation == "oracle":
        return whole
    if options.kv_reservation == "max":
        return max_len
    return min(request.prompt + (1 << (request.answer - 1).bit_length()), max_len)


def _step_bytes(decoder: Decoder, num_tokens: int, num_sequences: int) -> int:
    """The residual, a norm of it, and a gated MLP of a layer; then the logits and their draw."""
    rows = 2 * decoder.hidden_size + 3 * decoder.intermediate_size
    layer = num_tokens * rows * DTYPE_BYTES[decoder.dtype]
    return max(layer, num_sequences * decoder.vocab_size * SAMPLER_BYTES)


def kv_itemsize(decoder: Decoder, options: Options) -> int:
    """Of a number in the KV cache."""
    return DTYPE_BYTES[decoder.dtype] if options.kv_cache_dtype == "auto" else 1


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
