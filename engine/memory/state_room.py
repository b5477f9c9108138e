"""Slots for the states of sequences: one for each sequence that runs, and spare ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from core.configuration.batching import checkpoint_limit, state_limit
from core.states.layout import slot_bytes
from core.states.room import StateSlots, num_spare_states
from engine.attention.states import StatePool
from engine.device import DTYPES
from engine.group import Group
from engine.loading.packed_model import PackedModel
from engine.memory.capacity import Beside
from engine.model.mixers.mamba2 import clamps_prompts
from engine.resolve import Resolved
from engine.step.column import RepeatableColumn
from engine.step.state_column import StateColumn

MIB = 2**20


class StateRoom(Beside):
    """The states that a model keeps, in a share of the memory for K and V."""

    why_no_graphs = "the model keeps states of sequences"
    why_bits_vary = "states are computed in tiles, which begin where a chunk does"

    def __init__(self, model: PackedModel, resolved: Resolved, group: Group) -> None:
        self._model, self._group = model, group
        self._max_sequences = resolved.limits.max_sequences
        num_spare = num_spare_states(resolved.num_drafts, self._max_sequences)
        self._resolved = resolved
        self.answers_differ = clamps_prompts(model.config.get_text_config())
        self._sum_dtype = DTYPES[resolved.memory.state_dtype]
        if self._sum_dtype != torch.float32:
            self.why_bits_vary = "option.state_dtype rounds states after each chunk"
        elif model.device.type == "cpu":
            self.why_bits_vary = ""
        bytes_each = slot_bytes(model.states, model.dtype.itemsize, self._sum_dtype.itemsize)
        self._keep(StateSlots(bytes_each, state_limit(self._max_sequences), num_spare))

    def _keep(self, slots: StateSlots) -> None:
        self._slots = slots
        self.num_sequences = min(self._max_sequences, slots.num_running)
        self.num_states, self.num_spare_states = slots.count, slots.num_spare
        self.num_checkpoints = self._num_wanted = 0
        kinds = set(self._model.shapes)
        if len(kinds) == 1 and all(kind.window is None for kind in kinds):
            memory, batching = self._resolved.memory, self._resolved.batching
            self._num_wanted = checkpoint_limit(memory, batching, self.num_sequences)
            self.num_checkpoints = self._num_wanted

    @property
    def notes(self) -> tuple[str, ...]:
        slots = self._slots
        width = (2 * slots.num_running + 1) // 3
        search = f" (or a search {width} wide)" if slots.num_running > self.num_sequences else ""
        drafts = f" and {slots.num_spare} drafts" if slots.num_spare else ""
        note = (
            f"each sequence keeps a state of {_size_text(slots.bytes_each)}: "
            f"{_size_text(slots.num_bytes)} for {self.num_sequences}{search}{drafts}; "
            f"{self._checkpoints}"
        )
        if self.num_sequences == self._max_sequences:
            return (note,)
        return (
            note,
            f"batches lowered from {self._max_sequences} to {self.num_sequences}: states would "
            "take more than their share of the memory for K and V; raise "
            "option.kv_cache_memory_bytes or option.gpu_memory_utilization",
        )

    @property
    def _checkpoints(self) -> str:
        if not self.num_checkpoints:
            return "prefixes are not cached"
        each, on_host = self._slots.bytes_each, self.num_host_checkpoints
        kept = f"{_size_text(self.num_checkpoints * each)} more for {self.num_checkpoints}"
        more = f" and {_size_text(on_host * each)} of host memory for {on_host}" if on_host else ""
        return f"{kept}{more} checkpoints of cached prefixes"

    def take(self, num_bytes: int, sequence_bytes: int) -> int:
        most, lowest = self._slots.share(num_bytes, sequence_bytes), self._group.lowest
        slots = self._slots.within(most)
        num_running, num_spare = lowest(slots.num_running), lowest(slots.num_spare)
        self._keep(StateSlots(slots.bytes_each, num_running, num_spare))
        self.num_checkpoints = lowest(min(self.num_checkpoints, self._slots.num_besides(most)))
        return num_bytes - self._slots.num_bytes - self.num_checkpoints * slots.bytes_each

    def take_swap(self, num_bytes: int, sequence_bytes: int) -> int:
        most, lowest = self._slots.share(num_bytes, sequence_bytes), self._group.lowest
        num_wanted = 0
        if self.num_checkpoints and self._resolved.memory.state_checkpoints is not None:
            num_wanted = self._num_wanted - self.num_checkpoints
        each = self._slots.bytes_each
        num_swapped = self._slots.within(most, least=0).num_running
        self.num_swap_states = lowest(min(most // each, num_swapped + num_wanted))
        self.num_host_checkpoints = min(num_wanted, self.num_swap_states)
        return num_bytes - self.num_swap_states * each

    def pool(self) -> StatePool:
        model = self._model
        num_slots = self.num_states + self.num_checkpoints
        num_host = self.num_swap_states
        return StatePool(
            model.states, num_slots, model.dtype, model.device, num_host, self._sum_dtype
        )

    def columns(self) -> Sequence[RepeatableColumn]:
        return (StateColumn(),)


def _size_text(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.1f} MiB" if num_bytes >= MIB else f"{num_bytes / 1024:,.1f} KiB"
