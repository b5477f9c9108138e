"""All layers of a decoder in one call of the library.

If kernels are called one by one, Python checks and collects the arguments of every kernel on every
call, which takes longer than a small step takes to compute. Here, layers add their kernels once,
for buffers that all steps use. A step sets what differs: the number of tokens, their places in the
KV cache and the angles of their positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kernels.attention.batch import PagedBatch
from kernels.cpu.attention import Attention, attention
from kernels.cpu.cache import Write, write
from kernels.cpu.calls import Calls, Kernel
from kernels.cpu.elementwise import Rotary, rotation

SET_BYTES = 4096
"""Addresses this far apart are in one set of the L1 cache."""
LINE_BYTES = 64


class StepCalls:
    """The kernels of a step, in the order in which they run.

    The KV cache, `keys` and `values`, is one pair of `key_cache` and `value_cache` of
    `kernels.cpu.attention.paged_attention` for each layer.
    """

    def __init__(
        self,
        num_rows: int,
        width: int,
        dtype: torch.dtype,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        groups: Sequence[int],
        states: Sequence[Sequence[Tensor]] = (),
    ) -> None:
        """num_rows: the most tokens of a step. width, dtype: those of hidden states. groups: the
        index of each layer's cache group. states: the tensors of each layer with a state."""
        self.num_rows = num_rows
        self._dtype = dtype
        self._memory: dict[str, Tensor] = {}
        self.hidden = self.buffer("hidden", width)
        """The residual stream, which each layer reads and overwrites."""
        self.result = self.hidden
        """What the last kernel leaves for the caller, [num_rows, width]."""
        self.states = states
        self.residual_scale = 1.0
        """What the outputs of layers are multiplied by before they are added to `hidden`."""
        self._keys, self._values, self._groups = keys, values, groups
        self._kernels: list[Kernel[Any]] = []
        self._attentions: list[tuple[int, Attention, Write]] = []
        """Those of each layer, with its cache group."""
        self._rotaries: list[tuple[str, Rotary]] = []
        self._set_places: list[Callable[[PagedBatch], None]] = []
        self._num_first = 0
        """Number of kernels up to the last one that needs all tokens."""
        self._mixed: tuple[Tensor, ...] = ()
        """What later ones read of its layer."""

    @cached_property
    def _run_all(self) -> Calls:
        return Calls(self._kernels)

    @cached_property
    def _first(self) -> _Part:
        """The kernels up to the last one that needs all tokens."""
        return _Part(self._kernels[: self._num_first])

    @cached_property
    def _last(self) -> _Part:
        return _Part(self._kernels[self._num_first :])

    def buffer(self, name: str, width: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return rows [num_rows, width], undefined at first, that a layer may overwrite.

        All buffers of a name share their memory, and have one dtype: that of hidden states, or
        another. Rows whose starts would be in one set of the L1 cache lie apart: they would evict
        each other when they are multiplied.
        """
        dtype = dtype or self._dtype
        collide = width * dtype.itemsize % SET_BYTES == 0
        stride = width + LINE_BYTES // dtype.itemsize if collide else width
        size = self.num_rows * stride
        memory = self._memory.get(name)
        if memory is None or len(memory) < size:
            memory = self._memory[name] = torch.empty(size, dtype=dtype)
        return memory[:size].view(self.num_rows, stride)[:, :width]

    def add(self, kernel: Kernel[Any]) -> None:
        self._kernels.append(kernel)

    def add_placed(
        self, kernel: Kernel[Any], set_places: Callable[[PagedBatch], None], *mixed: Tensor
    ) -> None:
        """Add a kernel that gets the places of a step's tokens from `set_places`, and needs all
        tokens. mixed: what later kernels of its layer read, [num_rows, ...]."""
        self.add(kernel)
        self._set_places.append(set_places)
        self._num_first, self._mixed = len(self._kernels), mixed

    def add_reads(self, *mixed: Tensor) -> None:
        """Say what else later kernels read of the layer whose tokens were mixed last."""
        self._mixed += mixed

    def rotate(self, rope: str, query: Tensor, key: Tensor, rotary_dim: int) -> None:
        """Rotate heads [num_rows, heads, dim] in place by the angles that a step has for `rope`.

        Raises NoKernelError.
        """
        kernel = rotation(query, key, rotary_dim)
        self._rotaries.append((rope, kernel.arguments))
        self.add(kernel)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Any
    ) -> Tensor:
        """Write a layer's keys and values to its cache, attend, and return the output,
        [num_rows, heads, value_dim].

        options: the keyword arguments of `kernels.cpu.attention.attention`. Raises NoKernelError.
        """
        keys, values = self._keys[layer], self._values[layer]
        heads, dim = query.shape[1], value.shape[2]
        out = self.buffer("attended", heads * dim).unflatten(1, (heads, dim))
        attending = attention(query, keys, values, out, **options)  # checks the sizes for both
        writing = write(key, value, keys, values)
        self._attentions.append((self._groups[layer], attending.arguments, writing.arguments))
        self.add(writing)
        self.add(attending)
        self._num_first, self._mixed = len(self._kernels), (out,)
        return out

    def __call__(
        self,
        hidden: Tensor,
        angles: Mapping[str, tuple[Tensor, Tensor]],
        batches: Sequence[PagedBatch],
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return `result` for the tokens, [T, width], or for those at `rows`, [R, width]. The next
        call overwrites it.

        hidden: [T, width], with T <= num_rows. angles: cos and sin, [T, half] or [T, rotary_dim],
        dense, of each rope. batches: one for each cache group. rows: [R] int64, with R <= T. After
        its attention, or what stands in its place, the last layer computes only these.
        """
        num_tokens = len(hidden)
        self.hidden[:num_tokens] = hidden
        slots = [batch.slot_mapping.data_ptr() for batch in batches]
        for group, attending, writing in self._attentions:
            attending.set_batch(batches[group])
            writing.slots = slots[group]
        for set_places in self._set_places:
            set_places(batches[0])
        for rope, arguments in self._rotaries:
            arguments.set_angles(*angles[rope])
        self._first.set_num_tokens(num_tokens)
        if rows is None:
            self._last.set_num_tokens(num_tokens)
            self._run_all()
            return self.result[:num_tokens]
        self._first.run()
        num_tokens = len(rows)
        for buffer in (self.hidden, *self._mixed):
            buffer[:num_tokens] = buffer.index_select(0, rows)
        self._last.set_num_tokens(num_tokens)
        self._last.run()
        return self.result[:num_tokens]


class _Part:
    """Some of the kernels, in one call."""

    def __init__(self, kernels: Sequence[Kernel[Any]]) -> None:
        self.run = Calls(kernels)
        arguments = (kernel.arguments for kernel in kernels)
        self._arguments = [each for each in arguments if hasattr(each, "num_tokens")]
        self._num_tokens = -1

    def set_num_tokens(self, num_tokens: int) -> None:
        if num_tokens != self._num_tokens:
            self._num_tokens = num_tokens
            for arguments in self._arguments:
                arguments.num_tokens = num_tokens
