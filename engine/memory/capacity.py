"""Measures what fits into memory: the number of KV blocks, and the limits that follow from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from core.configuration.kv_layout import plan_layout
from core.configuration.options import MemoryOptions
from core.configuration.sizing import (
    StepLimits,
    blocks_for,
    fit_length,
    gpu_kv_budget,
)
from core.configuration.step_size import graph_sizes
from core.errors import InsufficientMemoryError
from core.process.host_memory import available_host_memory
from engine.attention.backends import make_backend
from engine.group import Group
from engine.loading.packed_model import PackedModel
from engine.memory.largest_step import ScratchBytes, peak_bytes, run_forward, run_step
from engine.resolve import Capacity, MachineShare, Resolved
from engine.step.block_tables import table_bytes

MIB = 2**20
GIB = 2**30
MAX_DEFAULT_ON_CPU = 4 * GIB
MAX_DEFAULT_SWAP = 4 * GIB
KV_PER_WEIGHT = 16
"""By default, KV blocks on a CPU take at most this many bytes per byte of weights.

A step reads the weights once, and the K and V of all running sequences. When K and V are many times
larger than the weights, more sequences hardly add tokens per second.
"""
MIN_DEFAULT_ON_CPU = 128 * 2**20


def measure(resolved: Resolved, model: PackedModel, group: Group) -> Capacity:
    """Choose the number of KV blocks. Limits are changed to fit the memory and one another.

    group: the ranks that share the model; the rank with the least memory decides.

    Raises InsufficientMemoryError if the largest step does not fit beside the weights, and as
    `fit_length` does.
    """
    memory, limits = resolved.memory, resolved.limits
    step_tokens, step_notes = _with_room_for_input(model, limits)
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
    per_block = layout.block_bytes
    num_swap_blocks, reserved_bytes = 0, 0
    states = _room_for_states(model, limits.max_sequences, resolved.num_spare_states)
    if memory.num_kv_blocks is not None:
        num_blocks = layout.num_blocks(model.shapes, memory.num_kv_blocks, itemsize)
    else:
        if model.device.type == "cuda":
            reserved_bytes = _bytes_beside_blocks(resolved, model, step_tokens)
            reserved_bytes += (len(layout.groups) - 1) * _table_bytes(resolved)
        budget = kv_budget(memory, resolved.share, model.device, reserved_bytes)
        states = states.within(budget // 2)
        budget -= states.num_bytes
        if model.device.type == "cpu" and memory.kv_cache_memory_bytes is None:
            budget = min(
                budget, useful_kv_bytes(model.weights_bytes, blocks_of_longest * per_block)
            )
        num_blocks = group.lowest(min(usable, budget // per_block))
    num_swap_states = 0
    if resolved.may_swap:
        swap_bytes = swap_budget(memory, resolved.share)
        num_swap_states = states.within(swap_bytes // 2, least=0).num_sequences
        swap_bytes -= num_swap_states * states.bytes_each
        num_swap_blocks = group.lowest(min(usable, swap_bytes // per_block))
    longest = layout.longest(num_blocks, limits.max_model_len)
    length, notes = fit_length(memory, limits.max_model_len, longest)
    return Capacity(
        layout=layout,
        max_model_len=length,
        max_step_tokens=step_tokens,
        num_blocks=num_blocks,
        num_swap_blocks=num_swap_blocks,
        num_states=states.count,
        num_spare_states=states.num_spare,
        num_swap_states=num_swap_states,
        state_bytes=states.bytes_each,
        kv_bytes=num_blocks * per_block,
        activation_bytes=reserved_bytes,
        notes=notes + step_notes + states.notes(limits.max_sequences),
    )


@dataclass(frozen=True, slots=True)
class StateRoom:
    """Slots for the states of sequences, one for each sequence that runs, and spare ones."""

    bytes_each: int
    num_sequences: int
    num_spare: int

    @property
    def count(self) -> int:
        return self.num_sequences + self.num_spare

    @property
    def num_bytes(self) -> int:
        return self.bytes_each * self.count

    def within(self, num_bytes: int, least: int = 1) -> StateRoom:
        """Return as many slots as these bytes hold, but of sequences not fewer than `least`.

        At most half of them are spare.
        """
        if self.num_bytes <= num_bytes:
            return self
        count = max(least, num_bytes // self.bytes_each)
        num_spare = min(self.num_spare, count // 2)
        return StateRoom(self.bytes_each, count - num_spare, num_spare)

    def notes(self, max_sequences: int) -> tuple[str, ...]:
        if not self.count:
            return ()
        drafts = f" and {self.num_spare} drafts" if self.num_spare else ""
        note = (
            f"each sequence keeps a state of {size_text(self.bytes_each)} beside its K and V: "
            f"{size_text(self.num_bytes)} for {self.num_sequences}{drafts}; prefixes are not cached"
        )
        if self.num_sequences == max_sequences:
            return (note,)
        return (
            note,
            f"batches lowered from {max_sequences} to {self.num_sequences}: states would take more "
            "than half of the memory for K and V; raise option.kv_cache_memory_bytes or "
            "option.gpu_memory_utilization",
        )


def size_text(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.1f} MiB" if num_bytes >= MIB else f"{num_bytes / 1024:,.1f} KiB"


def _room_for_states(model: PackedModel, max_sequences: int, num_spare: int) -> StateRoom:
    if not model.states:
        return StateRoom(0, 0, 0)
    from core.states.layout import slot_bytes

    return StateRoom(slot_bytes(model.states, model.dtype.itemsize), max_sequences, num_spare)


def _with_room_for_input(model: PackedModel, limits: StepLimits) -> tuple[int, tuple[str, ...]]:
    """Return the tokens of a step with room for an encoder's input besides all decodes, and notes.

    Some models must compute all of an input in one step. Without room for that, it could wait
    forever.
    """
    encoder = model.encoder
    if encoder is None or not encoder.undivided_tokens:
        return limits.max_step_tokens, ()
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
    width = max(shape.numel for shape in model.shapes)
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
) -> int:
    """Return the bytes of device memory that steps need besides the weights and the KV cache.

    That is the peak of the largest step, with sampling and attention's scratch. CUDA graphs add
    their logits buffer, and the peak of the largest graph's forward pass, which their memory pool
    keeps; they do not sample. A model with an encoder also needs memory for it, and for the
    embeddings that it keeps.

    scratch_bytes: tells what the attention backend that will serve takes. graph_prompt_sizes: None
    if there are no graphs. measure: runs a function and returns the peak of the bytes that the
    function allocates.

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
        largest = graph_sizes(max_sequences, step_tokens, graph_prompt_sizes)[-1]
        num_rows = largest.num_sequences
        forward = partial(run_forward, model, largest.num_tokens, num_rows, scratch_bytes)
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
    swap_bytes = min(MAX_DEFAULT_SWAP, available_host_memory() // share.num_copies // 4)
    if memory.swap_space_gib is not None:
        swap_bytes = int(memory.swap_space_gib * GIB)
    return swap_bytes // share.num_ranks
