"""Adapters as a column of a step: the adapter slot of each token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from core.adapter import adapter_of
from core.part import Part
from core.plan import Chunk
from engine.lora.memory import AdapterMemory
from engine.staging import Slot, Upload
from engine.step.column import PerToken, PerTokenColumn
from engine.step.places import Places


class AdapterColumn(PerTokenColumn):
    name = "adapters"
    padding = -1

    def __init__(self, memory: AdapterMemory) -> None:
        self.memory = memory

    def is_used(self, chunks: Sequence[Chunk]) -> bool:
        return any(adapter_of(chunk.sequence.parts) for chunk in chunks)

    def number_of(self, parts: tuple[Part, ...]) -> int:
        adapter = adapter_of(parts)
        return self.padding if adapter is None else adapter.slot

    def plan(self, places: Places, tokens: NDArray[np.int64], upload: Upload) -> PerToken:
        slots = np.full(tokens.shape[1], self.padding, np.int64)
        for chunk, start in places:
            slots[start : start + chunk.length] = self.number_of(chunk.sequence.parts)
        return self.of(upload.put(slots))

    def of(self, numbers: Slot) -> PerToken:
        return _AdapterSlots(self.name, numbers, self.memory)


class _AdapterSlots(PerToken):
    adds_to_linears = True

    def __init__(self, name: str, numbers: Slot, memory: AdapterMemory) -> None:
        super().__init__(name, numbers)
        self._memory = memory

    def begin(self) -> None:
        self._memory.choose(self.numbers)

    def end(self) -> None:
        self._memory.choose(None)
