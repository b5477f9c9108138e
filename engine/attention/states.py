"""The slots of states on the device, and the operations of the layers that keep them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from core.plan import BlockPairs
from core.states.layout import LayerState, offsets
from kernels.cpu import state as cpu_state
from kernels.cpu.shared_library import unavailable_reason
from kernels.state import reference
from kernels.state.batch import StateBatch


class States(Protocol):
    """The operations of layers with a state on the tokens of a forward pass.

    layer: the number of a layer among those that keep a state. The other arguments are those of
    `kernels.state.reference`, without the slots and the batch.
    """

    in_prompt: Tensor
    """[T] bool: whether a token belongs to its sequence's prompt."""

    def convolve(
        self, layer: int, rows: Tensor, weight: Tensor, bias: Tensor | None, **options: Any
    ) -> Tensor:
        """Return what `conv_rows` does. The first tensor of the layer's state has the tails."""
        ...

    def gates(self, time: Tensor, *others: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the decay and the rate of a recurrence, as `state_gates` does."""
        ...

    def advance(self, layer: int, *tokens: Tensor, **options: Any) -> Tensor:
        """Return what `state_step` does. The second tensor of the layer's state has the matrices.

        tokens: query, key, value, decay and rate.
        """
        ...

    def scan(self, layer: int, *tokens: Tensor) -> Tensor:
        """Return what `scan` does. The second tensor of the layer's state has the matrix.

        tokens: query, key, value, rate, scale and skip.
        """
        ...


class Operations(NamedTuple):
    """The functions of `kernels.state.reference` on a device."""

    conv_rows: Callable[..., Tensor]
    advance: Callable[..., Tensor]
    scan: Callable[..., Tensor]
    gates: Callable[..., tuple[Tensor, Tensor]] = reference.state_gates


def choose_operations(device: torch.device, layers: Sequence[LayerState]) -> Operations:
    """Return the fastest operations that support these states."""
    if device.type == "cuda":
        # Imported only here, so that CPUs do not need Triton.
        from kernels.state import conv_rows, rows, scan, state_tiles

        shapes = [shape for layer in layers for shape in layer]
        if all(rows.is_supported(shape.dims, is_sum=shape.is_sum) for shape in shapes):
            return Operations(conv_rows.conv_rows, state_tiles.state_tiles, scan.scan)
        return Operations(reference.conv_rows, reference.state_tiles, reference.scan)
    if unavailable_reason() is None:
        operations = (cpu_state.conv_rows, cpu_state.state_step, cpu_state.scan)
        return Operations(*operations, cpu_state.state_gates)
    return Operations(reference.conv_rows, reference.state_step, reference.scan)


class StatePool:
    """Slots of states: a row of bytes for each sequence, with the states of all its layers.

    ```
    slot 0   | tails of layer 0 | matrices of layer 0 | tails of layer 1 | ...
    slot 1   | ...
    ```

    `host` holds swapped slots in host memory, pinned if the device is a GPU.
    """

    def __init__(
        self,
        layers: Sequence[LayerState],
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        num_host_slots: int = 0,
        sum_dtype: torch.dtype = torch.float32,
    ) -> None:
        """layers: of each layer with a state. dtype: of the computation. sum_dtype: of sums."""
        self.operations = choose_operations(device, layers)
        *starts, size = offsets(layers, dtype.itemsize, sum_dtype.itemsize)
        self.rows = torch.zeros(num_slots, size, dtype=torch.uint8, device=device)
        self.host = torch.empty(
            num_host_slots, size, dtype=torch.uint8, pin_memory=device.type == "cuda"
        )
        self.layers: list[tuple[Tensor, ...]] = []
        """Each layer's tensors, [slots, ...], as views of `rows`."""
        begins = iter(starts)
        for layer in layers:
            views: list[Tensor] = []
            for shape, start in zip(layer, begins, strict=False):
                kind = sum_dtype if shape.is_sum else dtype
                part = self.rows[:, start : start + prod(shape.dims) * kind.itemsize]
                views.append(part.view(kind).unflatten(1, shape.dims))
            self.layers.append(tuple(views))

    def swap(self, outs: BlockPairs, ins: BlockPairs) -> None:
        """Copy slots to the host, then others back, in the order of the device's work."""
        for slot, host in outs:
            self.host[host].copy_(self.rows[slot], non_blocking=True)
        for host, slot in ins:
            self.rows[slot].copy_(self.host[host], non_blocking=True)


class StateStep(States):
    """Computes on the slots of a pool."""

    def __init__(self, pool: StatePool, batch: StateBatch, in_prompt: Tensor) -> None:
        """in_prompt: [T] bool, whether a token belongs to the prompt."""
        self._layers, self._batch, self._operations = pool.layers, batch, pool.operations
        self.in_prompt = in_prompt

    def convolve(
        self, layer: int, rows: Tensor, weight: Tensor, bias: Tensor | None, **options: Any
    ) -> Tensor:
        tails, convolve = self._layers[layer][0], self._operations.conv_rows
        return convolve(rows, weight, bias, tails, self._batch, **options)

    def gates(self, time: Tensor, *others: Tensor | None) -> tuple[Tensor, Tensor]:
        return self._operations.gates(time, *others)

    def advance(self, layer: int, *tokens: Tensor, **options: Any) -> Tensor:
        return self._operations.advance(*tokens, self._layers[layer][1], self._batch, **options)

    def scan(self, layer: int, *tokens: Tensor) -> Tensor:
        return self._operations.scan(*tokens, self._layers[layer][1], self._batch)
