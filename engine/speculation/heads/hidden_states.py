"""The hidden states that a model leaves of its tokens, for a head that reads them later.

They lie beside K and V, in the same blocks: so prefixes, forks, swaps and preemption need no code
for them, and a head reads only what it has to propose from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.configuration.kv_layout import CacheGroup
from core.errors import ConfigurationError
from core.plan import BlockTable, Chunk
from engine.attention.kv_cache import KVCache
from engine.staging import Slot, Upload
from engine.step.column import PerToken, PerTokenColumn
from engine.step.places import Places


def keeping_group(groups: Sequence[CacheGroup]) -> int:
    """Return the index of a group whose blocks are held as long as their sequence runs.

    Raises ConfigurationError if there is none.
    """
    for index, group in enumerate(groups):
        if group.window is None:
            return index
    raise ConfigurationError(
        "option.speculative_method: all layers of the model have a sliding window, so nothing is "
        "kept of old tokens that a head could read; choose another method"
    )


class HiddenStates:
    def __init__(self, cache: KVCache, width: int, dtype: torch.dtype) -> None:
        """cache: has as much room beside its blocks as `bytes_of` says."""
        assert cache.beside is not None, "blocks have room for states"
        self.index = keeping_group(cache.groups)
        """The group in whose blocks they lie."""
        self.group: CacheGroup = cache.groups[self.index]
        self.rows = cache.beside.view(dtype).view(-1, width)
        """[slots + block size, width]. The last of them takes what padding leaves."""

    def slots(self, tables: Sequence[BlockTable], start: int, end: int) -> NDArray[np.int64]:
        """Return the rows of the states at positions `start : end` of a sequence."""
        block, offset = np.divmod(np.arange(start, end), self.group.block_size)
        return np.array(tables[self.index].blocks, np.int64)[block] * self.group.block_size + offset


class Fusion(NamedTuple):
    """Makes one state of what several layers leave of a token."""

    layers: tuple[int, ...]
    """In ascending order."""
    fuse: Callable[[Tensor], Tensor]
    """From [T, layers * hidden], side by side, to [T, width]."""


class HiddenStatesColumn(PerTokenColumn):
    """Keeps a state of each token of each step: the final norm's output, or a fused one."""

    name = "hidden states"
    padding = -1
    needs_part = False

    def __init__(self, states: HiddenStates, fusion: Fusion | None = None) -> None:
        """fusion: None for the final norm's output."""
        self._states, self._fusion = states, fusion

    def is_used(self, chunks: Sequence[Chunk]) -> bool:
        return True

    def plan(self, places: Places, tokens: NDArray[np.int64], upload: Upload) -> PerToken:
        group = self._states.group
        slots = tokens[2 + self._states.index]
        rows = slots // group.slot_stride * group.block_size + slots % group.slot_stride
        return self.of(upload.put(np.where(slots < 0, self.padding, rows)))

    def of(self, numbers: Slot) -> PerToken:
        if self._fusion is None:
            return _Kept(self.name, numbers, self._states.rows)
        return _Fused(self.name, numbers, self._states.rows, self._fusion)


class OthersStatesColumn(PerTokenColumn):
    """The column of processes that follow. They keep no states, and compute the same rows."""

    name = HiddenStatesColumn.name
    padding = HiddenStatesColumn.padding
    needs_part = False

    def __init__(self, *, is_fused: bool) -> None:
        self._is_fused = is_fused

    def is_used(self, chunks: Sequence[Chunk]) -> bool:
        return True

    def plan(self, places: Places, tokens: NDArray[np.int64], upload: Upload) -> PerToken:
        return self.of(upload.put(np.full(tokens.shape[1], self.padding)))

    def of(self, numbers: Slot) -> PerToken:
        return _OfOthers(self.name, numbers, is_fused=self._is_fused)


class _OfOthers(PerToken):
    def __init__(self, name: str, numbers: Slot, *, is_fused: bool) -> None:
        super().__init__(name, numbers)
        self.adds_to_layers, self.reads_normed = is_fused, not is_fused


class _Kept(PerToken):
    reads_normed = True

    def __init__(self, name: str, numbers: Slot, rows: Tensor) -> None:
        super().__init__(name, numbers)
        self._rows = rows

    def read_normed(self, normed: Tensor) -> None:
        self._rows[self.numbers] = normed


class _Fused(PerToken):
    adds_to_layers = True

    def __init__(self, name: str, numbers: Slot, rows: Tensor, fusion: Fusion) -> None:
        super().__init__(name, numbers)
        self._rows, self._fusion = rows, fusion
        self._found: list[Tensor] = []

    def after_layer(self, index: int, hidden: Tensor, output: Tensor | None) -> None:
        if index not in self._fusion.layers:
            return
        self._found.append(hidden.clone() if output is None else hidden + output)
        if len(self._found) == len(self._fusion.layers):
            self._rows[self.numbers] = self._fusion.fuse(torch.cat(self._found, -1))
            self._found.clear()
