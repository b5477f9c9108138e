"""Measures what fits into memory: the number of KV blocks, and the limits that follow from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from core.configuration.batching import StepLimits
from core.configuration.kv_layout import KVLayout, plan_layout
from core.configuration.options import MemoryOptions
from core.configuration.sizing import blocks_for, fit_length, gpu_kv_budget, most_swap_bytes
from core.configuration.step_size import graph_sizes, largest_of
from core.errors import InsufficientMemoryError
from core.process.host_memory import available_host_memory
from engine.attention.backends import make_backend
from engine.group import Group
from engine.loading.packed_model import Encoder, PackedModel
from engine.memory.largest_step import ScratchBytes, peak_bytes, run_forward, run_step
from engine.resolve import Capacity, MachineShare, Resolved
from engine.step.block_tables import table_bytes
from engine.step.column import RepeatableColumn

if TYPE_CHECKING:
    from engine.attention.states import StatePool

GIB = 2**30
MAX_DEFAULT_ON_CPU = 4 * GIB
KV_PER_WEIGHT = 16
"""By default, KV blocks on a CPU take at most this many bytes per byte of weights.

A step reads the weights once, and the K and V of all running sequences. When K and V are many times
larger than the weights, more sequences hardly add tokens per second.
"""
MIN_DEFAULT_ON_CPU = 128 * 2**20


class BlockUse:
    """What else than K and V of the model takes their memory: nothing.

    Who needs some overrides what it takes. layout: of the model's blocks.
    """

    def bytes_elsewhere(self, layout: KVLayout) -> int:
        """Return the bytes that another memory has for each block."""
        return 0

    def bytes_beside(self, layout: KVLayout) -> int:
        """Return the bytes that lie beside each block, and move with it."""
        return 0

    def take(self, num_bytes: int) -> int:
        """Take some of the bytes for K, V and states besides. Return what is left."""
        return num_bytes


class Beside:
    """What a model keeps of its sequences beside the blocks of their K and V: nothing.

    A kind of model that keeps something overrides what that changes. `take` and `take_swap`
    are called first, where the sizes follow from the memory.
    """

    use: BlockUse = BlockUse()
    """What takes memory besides."""
    num_sequences: int = 0
    """Sequences that there is room for; 0 if nothing limits them."""
    num_states: int = 0
    """As in `StrategySettings`, as are the next five fields."""
    num_spare_states: int = 0
    num_checkpoints: int = 0
    answers_differ: bool = False
    num_swap_states: int = 0
    num_host_checkpoints: int = 0
    why_no_graphs: str = ""
    """Why steps cannot be CUDA graphs."""
    why_bits_vary: str = ""
    """Why the last bits of an answer may depend on its batch on a GPU."""

    @property
    def notes(self) -> tuple[str, ...]:
        return ()

    def take(self, num_bytes: int, sequence_bytes: int) -> int:
        """Take some of the device's memory for K and V. Return the bytes that are left.

        sequence_bytes: the K and V of a sequence of the maximum length.
        """
        return num_bytes

    def take_swap(self, num_bytes: int, sequence_bytes: int) -> int:
        """As `take`, of the host's memory for swapped blocks."""
        return num_bytes

    def pool(self) -> StatePool | None:
        """Allocate the memory that was taken."""
        return None

    def columns(self) -> Sequence[RepeatableColumn]:
        """Return the columns that every step has, in all processes that share the model."""
        return ()


def measure(resolved: Resolved, model: PackedModel, group: Group, beside: Beside) -> Capacity:
    """Choose the number of KV blocks. Limits are changed to fit the memory and one another.

    group: the ranks that share the model; the rank with the least memory decides. beside: takes
    memory, too.

    Raises InsufficientMemoryError if the largest step does not fit beside the weights, and as
    `fit_length` does.
    """
    memory, limits = resolved.memory, resolved.limits
    step_tokens, step_notes = limits.max_step_tokens, ()
    if model.encoder is not None and model.encoder.undivided_tokens:
        step_tokens, step_notes = _with_room_for_input(model.encoder, limits)
    itemsize = resolved.kv_dtype.itemsize
    layout = plan_layout(
        model.shapes,
        memory.block_size,
        itemsize,
        limits.max_model_len,
        step_tokens * (2 if resolved.overlaps else 1),
    )
    blocks_of_longest = layout.blocks_for(limits.max_model_len)
    usable = limits.max_sequences * blocks_of_longest
    per_block, bytes_beside = layout.block_bytes, beside.use.bytes_beside(layout)
    num_swap_blocks, reserved_bytes = 0, 0
    if memory.num_kv_blocks is not None:
        num_blocks = layout.num_blocks(model.shapes, memory.num_kv_blocks, itemsize)
    else:
        if model.device.type == "cuda":
            reserved_bytes = _bytes_beside_blocks(resolved, model, step_tokens)
            reserved_bytes += (len(layout.groups) - 1) * _table_bytes(resolved)
        num_bytes = per_block + bytes_beside + beside.use.bytes_elsewhere(layout)
        budget = kv_budget(memory, resolved.share, model.device, reserved_bytes)
        budget = beside.take(beside.use.take(budget), blocks_of_longest * num_bytes)
        if model.device.type == "cpu" and memory.kv_cache_memory_bytes is None:
            budget = min(
                budget, useful_kv_bytes(model.weights_bytes, blocks_of_longest * per_block)
            )
        num_blocks = group.lowest(min(usable, budget // num_bytes))
    if resolved.may_swap:
        num_bytes = per_block + bytes_beside
        swap_bytes = swap_budget(memory, resolved.share)
        swap_bytes = beside.take_swap(swap_bytes, blocks_of_longest * num_bytes)
        num_swap_blocks = group.lowest(min(usable, swap_bytes // num_bytes))
    longest = layout.longest(num_blocks, limits.max_model_len)
    length, notes = fit_length(memory, limits.max_model_len, longest)
    return Capacity(
        layout=layout,
        max_model_len=length,
        max_sequences=beside.num_sequences or limits.max_sequences,
        max_step_tokens=step_tokens,
        num_blocks=num_blocks,
        num_swap_blocks=num_swap_blocks,
        num_states=beside.num_states,
        num_spare_states=beside.num_spare_states,
        num_checkpoints=beside.num_checkpoints,
        answers_differ=beside.answers_differ,
        num_swap_states=beside.num_swap_states,
        num_host_checkpoints=beside.num_host_checkpoints,
        kv_bytes=num_blocks * per_block,
        activation_bytes=reserved_bytes,
        notes=notes + step_notes + beside.notes,
    )


def _with_room_for_input(encoder: Encoder, limits: StepLimits) -> tuple[int, tuple[str, ...]]:
    """Return the tokens of a step with room for an encoder's input besides all decodes, and notes.

    Without that room, an input that must be computed in one step could wait forever.
    """
    needed = limits.max_sequences + encoder.undivided_tokens
    if limits.max_step_tokens >= needed:
        return limits.max_step_tokens, ()
    note = (
        f"a step has up to {needed} tokens, not {limits.max_step_tokens}: {encoder.input}'s "
        f"{encoder.undivided_tokens} tokens are computed in one step, beside "
        f"{limits.max_sequences} sequences"
    )
    return needed, (note,)


def _bytes_beside_blocks(resolved: Resolved, model: PackedModel, step_tokens: int) -> int:
    """Return the bytes of a GPU that steps need besides the weights and the KV blocks."""
    limits, kv_dtype = resolved.limits, resolved.kv_dtype
    block_size, max_len = resolved.memory.block_size, limits.max_model_len
    backend, _ = make_backend(
        model.device,
        model.shapes,
        block_size,
        max_len,
        kv_dtype,
        in_segments=resolved.source.is_pinned,
    )
    num_bytes = activation_bytes(
        model,
        step_tokens,
        limits.max_sequences,
        lambda call, num_sequences: backend.scratch_bytes(call, kv_dtype, num_sequences),
        resolved.graph_prompt_sizes,
        num_drafts=resolved.num_drafts,
    )
    num_bytes += input_attention_bytes(model, max_len, kv_dtype)
    return num_bytes + _table_bytes(resolved)


def _table_bytes(resolved: Resolved) -> int:
    """Return the bytes of the block tables of a cache group."""
    limits = resolved.limits
    max_blocks = blocks_for(limits.max_model_len, resolved.memory.block_size)
    return table_bytes(limits.max_sequences, max_blocks)


def input_attention_bytes(model: PackedModel, max_len: int, kv_dtype: torch.dtype) -> int:
    """Return the bytes that attention within an encoder's input takes beside causal attention.

    It gathers the K and V of the longest sequence for one layer at a time, and has a mask.
    """
    undivided = model.encoder.undivided_tokens if model.encoder is not None else 0
    if not undivided:
        return 0
    width = max(shape.num_kv_heads * sum(shape.dims) for shape in model.shapes)
    itemsize = kv_dtype.itemsize
    itemsize += model.dtype.itemsize if kv_dtype != model.dtype else 0
    return max_len * (width * itemsize + undivided)


def activation_bytes(
    model: PackedModel,
    step_tokens: int,
    max_sequences: int,
    scratch_bytes: ScratchBytes,
    graph_prompt_sizes: tuple[int, ...] | None,
    measure: Callable[[Callable[[], Tensor], torch.device], int] = peak_bytes,
    num_drafts: int = 0,
) -> int:
    """Return the bytes of device memory that steps need besides the weights and the KV cache.

    That is the peak of the largest step, with sampling and attention's scratch. CUDA graphs add
    their logits buffer, and the peak of the largest graph's forward pass, which their memory pool
    keeps; they do not sample. A model with an encoder also needs memory for it, and for the
    embeddings that it keeps.

    scratch_bytes: tells what the attention backend that will serve takes. graph_prompt_sizes: None
    if there are no graphs. measure: runs a function and returns the peak of the bytes that the
    function allocates. num_drafts: as in `graph_sizes`.

    Raises InsufficientMemoryError if the largest step does not fit.
    """
    try:
        step = partial(run_step, model, step_tokens, max_sequences, scratch_bytes)
        largest_step = measure(step, model.device)
        if model.encoder is not None:  # it runs before the step
            largest_input = measure(model.encoder.run_largest, model.device)
            largest_step = max(largest_step, largest_input)
            largest_step += model.encoder.max_kept_bytes
        if graph_prompt_sizes is None:
            return largest_step
        sizes = graph_sizes(max_sequences, step_tokens, graph_prompt_sizes, num_drafts)
        num_rows = max(size.num_rows for size in sizes)
        num_tokens = largest_of(sizes).num_tokens
        forward = partial(run_forward, model, num_tokens, num_rows, scratch_bytes)
        logits = num_rows * model.config.get_text_config().vocab_size * torch.float32.itemsize
        return largest_step + measure(forward, model.device) + logits
    except torch.OutOfMemoryError as error:
        raise InsufficientMemoryError(
            f"a step of {step_tokens} tokens does not fit into the device's memory beside the "
            "weights; lower option.max_rolling_batch_prefill_tokens"
        ) from error


def kv_budget(
    memory: MemoryOptions, share: MachineShare, device: torch.device, activation_bytes: int = 0
) -> int:
    """Return the bytes for a rank's KV blocks. Call it once the weights are loaded.

    activation_bytes: bytes to leave free for steps on a GPU.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return gpu_kv_budget(memory, total, total - free, activation_bytes)
    if memory.kv_cache_memory_bytes is not None:
        return memory.kv_cache_memory_bytes // share.num_ranks
    available = available_host_memory() // share.num_copies
    return min(MAX_DEFAULT_ON_CPU, available // 4) // share.num_ranks


def useful_kv_bytes(weights_bytes: int, sequence_bytes: int) -> int:
    """Return the most memory that KV blocks on a CPU get by default.

    sequence_bytes: the K and V of a sequence of the maximum length, for which there is always room.
    """
    return max(MIN_DEFAULT_ON_CPU, KV_PER_WEIGHT * weights_bytes, sequence_bytes)


def swap_budget(memory: MemoryOptions, share: MachineShare) -> int:
    """Return the bytes of host memory for a rank's swapped-out blocks."""
    swap_bytes = most_swap_bytes(memory)
    if memory.swap_space_gib is None:
        swap_bytes = min(swap_bytes, available_host_memory() // share.num_copies // 4)
    return swap_bytes // share.num_ranks
