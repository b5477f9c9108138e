"""How long, how many and how much at once: limits, each lowered to what the others allow."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedConfig

from core.errors import InsufficientMemoryError
from core.options import Batching, Options
from core.sizing import (
    LENGTH_NAMES,
    blocks_for,
    bytes_per_block,
    fit_length,
    length_limit,
    sequence_limit,
    step_token_budget,
)
from engine.device import choose_kv_dtype
from engine.loading.packed_model import PackedModel
from engine.memory.budget import kv_budget, swap_budget
from engine.memory.largest_step import peak_bytes, run_step
from engine.step.library_executor import LibraryModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What `core.messages.Facts` tells of them, and the notes on what had to be lowered."""

    max_model_len: int
    max_sequences: int
    max_step_tokens: int
    num_blocks: int
    activation_bytes: int
    num_swap_blocks: int
    notes: tuple[str, ...]


def choose_sizes(options: Options, batching: Batching, model: PackedModel | LibraryModel) -> Sizes:
    """Limits and number of blocks, each lowered to what the others allow."""
    is_packed = isinstance(model, PackedModel)
    max_len = max_model_len(options, model.config)
    max_sequences = sequence_limit(options, batching)
    if is_packed:
        step_tokens = step_token_budget(options, model.device.type)
        # Fewer tokens in a step than sequences would leave the newest without a turn.
        max_sequences = min(max_sequences, step_tokens)
    else:
        step_tokens = max_sequences * max_len  # `generate` takes prompts whole
    usable = max_sequences * blocks_for(max_len, options.block_size)
    num_blocks = options.num_kv_blocks or usable
    activation_bytes = num_swap_blocks = 0
    if is_packed:
        kv_dtype = choose_kv_dtype(options, model.dtype, model.device)
        per_block = bytes_per_block(model.shapes, options.block_size, kv_dtype.itemsize)
        if options.num_kv_blocks is None:
            activation_bytes = _activation_bytes(model, step_tokens, max_sequences)
            budget = kv_budget(options, model.device, activation_bytes)
            num_blocks = min(usable, budget // per_block)
        if batching == "paged" and options.preemption_mode != "recompute":
            num_swap_blocks = min(usable, swap_budget(options) // per_block)
    max_len, notes = fit_length(options, max_len, num_blocks * options.block_size)
    return Sizes(
        max_model_len=max_len,
        max_sequences=max_sequences,
        max_step_tokens=step_tokens,
        num_blocks=num_blocks,
        activation_bytes=activation_bytes,
        num_swap_blocks=num_swap_blocks,
        notes=notes,
    )


def _activation_bytes(model: PackedModel, step_tokens: int, max_sequences: int) -> int:
    """Measured on CUDA: of the largest step, and of the decode step that the graphs keep apart."""
    if model.device.type != "cuda":
        return 0
    try:
        return sum(
            peak_bytes(partial(run_step, model, num_tokens, max_sequences), model.device)
            for num_tokens in (step_tokens, max_sequences)
        )
    except torch.OutOfMemoryError as error:
        raise InsufficientMemoryError(
            f"a step of {step_tokens} tokens does not fit into the device's memory beside the "
            "weights; lower option.max_rolling_batch_prefill_tokens"
        ) from error


def max_model_len(options: Options, config: PreTrainedConfig) -> int:
    """Most tokens of a sequence, before memory may lower it."""
    text_config: Any = config.get_text_config()
    lengths = (getattr(text_config, name, None) or 0 for name in LENGTH_NAMES)
    own = next((length for length in lengths if length > 0), None)
    return length_limit(options, own)
