"""Chooses the limits of an engine and the number of KV blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from core.configuration.limits import IMAGE_PIXELS
from core.configuration.options import Options
from core.configuration.sizing import (
    LENGTH_NAMES,
    blocks_for,
    bytes_per_block,
    fit_length,
    gpu_kv_budget,
    length_limit,
    sequence_limit,
    step_token_budget,
)
from core.configuration.step_size import graph_sizes
from core.configuration.strategy_table import STRATEGIES, Batching
from core.errors import InsufficientMemoryError
from core.process.host_memory import available_host_memory
from engine.attention.backends import make_backend
from engine.block_tables import table_bytes
from engine.device import choose_kv_dtype
from engine.loading.packed_model import PackedModel
from engine.memory.largest_step import ScratchBytes, peak_bytes, run_forward, run_step
from engine.ranks.group import Group, SingleRank
from engine.step.library_executor import LibraryModel

GIB = 2**30
MAX_DEFAULT_ON_CPU = 4 * GIB
MAX_DEFAULT_SWAP = 4 * GIB
KV_PER_WEIGHT = 16
"""By default, KV blocks on a CPU take at most this many bytes per byte of weights.

A step reads the weights once, and the K and V of all running sequences. When K and V are many times
larger than the weights, more sequences hardly add tokens per second.
"""
MIN_DEFAULT_ON_CPU = 128 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The limits that `core.protocol.messages.Facts` documents, and notes on limits that were
    lowered."""

    max_model_len: int
    max_sequences: int
    max_step_tokens: int
    num_blocks: int
    activation_bytes: int
    num_swap_blocks: int
    notes: tuple[str, ...]


def choose_sizes(
    options: Options,
    batching: Batching,
    model: PackedModel | LibraryModel,
    group: Group | None = None,
) -> Sizes:
    """Choose the limits and the number of KV blocks. Limits are lowered to fit one another.

    group: the ranks that share the model; the rank with the least memory decides. None: one rank.

    Raises InsufficientMemoryError if the largest step does not fit beside the weights, and as
    `fit_length` does.
    """
    group = group or SingleRank(model.device)
    num_local_ranks = group.size // options.layout.nodes
    is_packed = isinstance(model, PackedModel)
    max_len = max_model_len(options, model.config)
    max_sequences = sequence_limit(options.strategy, batching)
    if is_packed:
        step_tokens = step_token_budget(options.strategy, model.device.type)
        # With fewer tokens per step than sequences, the newest sequences would never be scheduled.
        max_sequences = min(max_sequences, step_tokens)
        step_tokens, image_notes = _with_room_for_image(options, model, step_tokens, max_sequences)
    else:
        step_tokens = max_sequences * max_len  # `generate` does not split prompts
        image_notes = ()
    usable = max_sequences * blocks_for(max_len, options.memory.block_size)
    num_blocks = options.memory.num_kv_blocks or usable
    reserved_bytes = num_swap_blocks = 0
    if is_packed:
        kv_dtype = choose_kv_dtype(options.memory, model.dtype, model.device)
        per_block = bytes_per_block(model.shapes, options.memory.block_size, kv_dtype.itemsize)
        if options.memory.num_kv_blocks is None:
            if model.device.type == "cuda":
                scratch = _scratch_bytes(options, model, max_len, kv_dtype)
                reserved_bytes = activation_bytes(
                    options, model, step_tokens, max_sequences, scratch
                )
                reserved_bytes += image_attention_bytes(model, max_len, kv_dtype)
                reserved_bytes += table_bytes(
                    max_sequences, blocks_for(max_len, options.memory.block_size)
                )
            budget = kv_budget(options, model.device, reserved_bytes, num_local_ranks)
            if model.device.type == "cpu" and options.memory.kv_cache_memory_bytes is None:
                longest = blocks_for(max_len, options.memory.block_size) * per_block
                budget = min(budget, useful_kv_bytes(model.weights_bytes, longest))
            num_blocks = group.lowest(min(usable, budget // per_block))
        if STRATEGIES[batching].is_paged and options.memory.preemption_mode != "recompute":
            swap_bytes = swap_budget(options) // num_local_ranks
            num_swap_blocks = group.lowest(min(usable, swap_bytes // per_block))
    max_len, notes = fit_length(options.memory, max_len, num_blocks * options.memory.block_size)
    return Sizes(
        max_model_len=max_len,
        max_sequences=max_sequences,
        max_step_tokens=step_tokens,
        num_blocks=num_blocks,
        activation_bytes=reserved_bytes,
        num_swap_blocks=num_swap_blocks,
        notes=notes + image_notes,
    )


def _with_room_for_image(
    options: Options, model: PackedModel, step_tokens: int, max_sequences: int
) -> tuple[int, tuple[str, ...]]:
    """Return the tokens of a step that has room for an image besides all decodes, and notes.

    Some models must compute all of an image in one step. Without room for that, the image could
    wait forever.
    """
    undivided = model.encoder.undivided_tokens if model.encoder is not None else 0
    needed = max_sequences + undivided
    if not undivided or step_tokens >= needed:
        return step_tokens, ()
    note = (
        f"a step has up to {needed} tokens, not {step_tokens}: an image's {undivided} tokens are "
        f"computed in one step, beside {max_sequences} sequences"
    )
    return needed, (note,)


def image_attention_bytes(model: PackedModel, max_len: int, kv_dtype: torch.dtype) -> int:
    """Return the bytes that attention within an image takes in addition to causal attention.

    It gathers the K and V of the longest sequence for one layer at a time, and has a mask.
    """
    undivided = model.encoder.undivided_tokens if model.encoder is not None else 0
    if not undivided:
        return 0
    width = max(shape.numel for shape in model.shapes)
    itemsize = kv_dtype.itemsize
    itemsize += model.dtype.itemsize if kv_dtype != model.dtype else 0
    return max_len * (width * itemsize + undivided)


def activation_bytes(
    options: Options,
    model: PackedModel,
    step_tokens: int,
    max_sequences: int,
    scratch_bytes: ScratchBytes,
    measure: Callable[[Callable[[], Tensor], torch.device], int] = peak_bytes,
) -> int:
    """Return the bytes of device memory that steps need besides the weights and the KV cache.

    That is the peak of the largest step, with sampling and attention's scratch. CUDA graphs add
    their logits buffer, and the peak of the largest graph's forward pass, which their memory pool
    keeps; they do not sample. A model that takes images also needs memory for its encoder, and for
    the embeddings that it keeps.

    measure: runs a function and returns the peak of the bytes that the function allocates.

    Raises InsufficientMemoryError if the largest step does not fit.
    """
    try:
        step = partial(run_step, model, step_tokens, max_sequences, scratch_bytes)
        largest_step = measure(step, model.device)
        if model.encoder is not None:  # it runs before the step
            largest_image = partial(model.encoder.run_blank, IMAGE_PIXELS.maximum)
            largest_step = max(largest_step, measure(largest_image, model.device))
            largest_step += model.encoder.max_kept_bytes
        if options.execution.enforce_eager:
            return largest_step
        largest = graph_sizes(max_sequences, step_tokens, options.execution.graph_prompt_sizes)[-1]
        num_rows = largest.num_sequences
        forward = partial(run_forward, model, largest.num_tokens, num_rows, scratch_bytes)
        logits = num_rows * model.config.get_text_config().vocab_size * torch.float32.itemsize
        return largest_step + measure(forward, model.device) + logits
    except torch.OutOfMemoryError as error:
        raise InsufficientMemoryError(
            f"a step of {step_tokens} tokens does not fit into the device's memory beside the "
            "weights; lower option.max_rolling_batch_prefill_tokens"
        ) from error


def _scratch_bytes(
    options: Options, model: PackedModel, max_len: int, kv_dtype: torch.dtype
) -> ScratchBytes:
    """Return a function that tells the scratch bytes of the backend that will serve.

    max_len: the most tokens of a context.
    """
    backend, _ = make_backend(
        model.device, model.shapes, options.memory.block_size, max_len, kv_dtype
    )
    return lambda call, num_sequences: backend.scratch_bytes(call, kv_dtype, num_sequences)


def max_model_len(options: Options, config: PreTrainedConfig) -> int:
    """Return how many tokens a sequence may have, according to the options and the config.

    Memory may have room for fewer.
    """
    text_config: Any = config.get_text_config()
    lengths = (getattr(text_config, name, None) or 0 for name in LENGTH_NAMES)
    trained_length = next((length for length in lengths if length > 0), None)
    return length_limit(options.memory, trained_length)


def kv_budget(
    options: Options, device: torch.device, activation_bytes: int = 0, num_local_ranks: int = 1
) -> int:
    """Return the bytes for a rank's KV blocks. Call it once the weights are loaded.

    activation_bytes: bytes to leave free for steps. num_local_ranks: ranks on this machine, which
    share its memory on a CPU.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return gpu_kv_budget(options.memory, total, total - free, activation_bytes)
    if options.memory.kv_cache_memory_bytes is not None:
        return options.memory.kv_cache_memory_bytes // num_local_ranks
    available = available_host_memory() // options.layout.copies
    return min(MAX_DEFAULT_ON_CPU, available // 4) // num_local_ranks


def useful_kv_bytes(weights_bytes: int, sequence_bytes: int) -> int:
    """Return the most memory that KV blocks on a CPU get by default.

    sequence_bytes: the K and V of a sequence of the maximum length, for which there is always room.
    """
    return max(MIN_DEFAULT_ON_CPU, KV_PER_WEIGHT * weights_bytes, sequence_bytes)


def swap_budget(options: Options) -> int:
    """Return the bytes of host memory for swapped-out blocks."""
    if options.memory.swap_space_gib is not None:
        return int(options.memory.swap_space_gib * GIB)
    return min(MAX_DEFAULT_SWAP, available_host_memory() // options.layout.copies // 4)
