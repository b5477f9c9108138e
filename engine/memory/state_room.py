"""Slots for the states of sequences: one for each sequence that runs, and spare ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from core.configuration.batching import checkpoint_limit, state_limit
from core.states.layout import slot_bytes
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
MOST_DRAFTING = 4
"""How many sequences may have all their drafts in one step. More hardly pay."""


class StateRoom(Beside):
    """The states that a model keeps. They take at most half of the memory for K and V."""

    why_no_graphs = "the model keeps states of sequences"
    why_bits_vary = "states are computed in tiles, which begin where a chunk does"

    def __init__(self, model: PackedModel, resolved: Resolved, group: Group) -> None:
        self._model, self._group = model, group
        self._max_sequences = resolved.limits.max_sequences
        # Drafts are taken back.
        num_spare = resolved.num_drafts * min(MOST_DRAFTING, self._max_sequences)
        self._resolved = resolved
        self.answers_differ = clamps_prompts(model.config.get_text_config())
        self._sum_dtype = DTYPES[resolved.memory.state_dtype]
        if self._sum_dtype != torch.float32:
            self.why_bits_vary = "option.state_dtype rounds states after each chunk"
        elif model.device.type == "cpu":
            self.why_bits_vary = ""
        bytes_each = slot_bytes(model.states, model.dtype.itemsize, self._sum_dtype.itemsize)
        self._keep(_Slots(bytes_each, state_limit(self._max_sequences), num_spare))

    def _keep(self, slots: _Slots) -> None:
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
            f"each sequence keeps a state of {_size_text(slots.bytes_each)} beside its K and V: "
            f"{_size_text(slots.num_bytes)} for {self.num_sequences}{search}{drafts}; "
            f"{self._checkpoints}"
        )
        if self.num_sequences == self._max_sequences:
            return (note,)
        return (
            note,
            f"batches lowered from {self._max_sequences} to {self.num_sequences}: states would "
            "take more than half of the memory for K and V; raise option.kv_cache_memory_bytes or "
            "option.gpu_memory_utilization",
        )

    @property
    def _checkpoints(self) -> str:
        if not self.num_checkpoints:
            return "prefixes are not cached"
        size = _size_text(self.num_checkpoints * self._slots.bytes_each)
        on_host = f", {self.num_host_checkpoints} on the host" if self.num_host_checkpoints else ""
        return f"{size} more for {self.num_checkpoints} checkpoints of cached prefixes{on_host}"

    def take(self, num_bytes: int) -> int:
        slots, lowest = self._slots.within(num_bytes // 2), self._group.lowest
        num_running, num_spare = lowest(slots.num_running), lowest(slots.num_spare)
        self._keep(_Slots(slots.bytes_each, num_running, num_spare))
        each, taken = slots.bytes_each, self._slots.num_bytes
        most = max(0, num_bytes // 2 - taken) // each
        self.num_checkpoints = lowest(min(self.num_checkpoints, most))
        return num_bytes - taken - self.num_checkpoints * each

    def take_swap(self, num_bytes: int) -> int:
        slots, lowest = self._slots.within(num_bytes // 2, least=0), self._group.lowest
        num_wanted = 0
        if self.num_checkpoints and self._resolved.memory.state_checkpoints is not None:
            num_wanted = self._num_wanted - self.num_checkpoints
        most = num_bytes // 2 // slots.bytes_each
        self.num_swap_states = lowest(min(most, slots.num_running + num_wanted))
        self.num_host_checkpoints = min(num_wanted, self.num_swap_states)
        return num_bytes - self.num_swap_states * slots.bytes_each

    def pool(self) -> StatePool:
        model = self._model
        num_slots = self.num_states + self.num_checkpoints
        num_host = self.num_swap_states
        return StatePool(
            model.states, num_slots, model.dtype, model.device, num_host, self._sum_dtype
        )

    def columns(self) -> Sequence[RepeatableColumn]:
        return (StateColumn(),)


@dataclass(frozen=True, slots=True)
class _Slots:
    bytes_each: int
    num_running: int
    num_spare: int

    @property
    def count(self) -> int:
        return self.num_running + self.num_spare

    @property
    def num_bytes(self) -> int:
        return self.bytes_each * self.count

    def within(self, num_bytes: int, least: int = 1) -> _Slots:
        """Return as many slots as these bytes hold, but of running sequences at least `least`.

        At most half of them are spare.
        """
        if self.num_bytes <= num_bytes:
            return self
        count = max(least, num_bytes // self.bytes_each)
        num_spare = min(self.num_spare, count // 2)
        return _Slots(self.bytes_each, count - num_spare, num_spare)


def _size_text(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.1f} MiB" if num_bytes >= MIB else f"{num_bytes / 1024:,.1f} KiB"
