"""The slots of the sequences' states, in each step of a model that keeps states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from core.plan import Chunk
from engine.staging import Slot, Upload
from engine.step.column import Repeatable, RepeatableColumn
from engine.step.places import Places
from kernels.attention.batch import PagedBatch
from kernels.state.batch import StateBatch

NOWHERE = -1


class StateColumn(RepeatableColumn):
    name = "states"
    needs_part = False

    def is_used(self, chunks: Sequence[Chunk]) -> bool:
        return True

    def fits_graph(self, chunks: Sequence[Chunk]) -> bool:
        return False  # graphs have no buffers for slots

    def plan(self, places: Places, tokens: NDArray[np.int64], upload: Upload) -> States:
        reads = [chunk.state.reads if chunk.start else NOWHERE for chunk in places.chunks]
        writes = np.full(places.size.num_tokens, NOWHERE, np.int64)
        in_prompt = np.zeros(places.size.num_tokens, np.bool_)
        spans: list[tuple[int, int]] = []
        for chunk, start in places:
            end = start + chunk.length
            spans.append((start, end))
            for length, slot in chunk.state.kept:
                writes[start + length - 1] = slot
            written = chunk.state.written
            writes[end - len(written) : end] = written
            in_prompt[start:end] = tokens[1, start:end] < chunk.sequence.num_prompt_tokens
        starts = np.array([0, *(end for _, end in spans)], np.int32)
        arrays = (starts, np.array(reads, np.int64), writes, in_prompt)
        slots = [upload.put(array) for array in arrays]
        return States(slots, (*spans, (places.step.num_decodes,)))

    def repeat(self, tensors: Sequence[Tensor], numbers: tuple[tuple[int, ...], ...]) -> States:
        return States([Slot(tensor) for tensor in tensors], numbers)


class States(Repeatable):
    name = StateColumn.name

    def __init__(self, slots: Sequence[Slot], numbers: tuple[tuple[int, ...], ...]) -> None:
        """slots: starts, reads, writes and `in_prompt`. numbers: the spans, and the decodes."""
        self._slots, self._numbers = slots, numbers

    @property
    def tensors(self) -> Sequence[Tensor]:
        return [slot.tensor for slot in self._slots]

    @property
    def numbers(self) -> tuple[tuple[int, ...], ...]:
        return self._numbers

    def batched(self, batch: PagedBatch) -> PagedBatch:
        starts, reads, writes, in_prompt = self.tensors
        *spans, (num_decodes,) = self._numbers
        pairs = tuple((start, end) for start, end in spans)
        states = StateBatch(starts, reads, writes, pairs, num_decodes)
        return replace(batch, states=states, in_prompt=in_prompt)
