"""The device's part of a step: block moves and forward passes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from core.configuration.step_size import StepSize
from core.plan import BlockMoves, Chunk
from engine.attention.backends import AttentionBackend
from engine.attention.call import PagedAttention
from engine.attention.kv_cache import KVCache
from engine.attention.paged_step import PagedStep
from engine.step.block_mover import BlockMover
from engine.step.column import Column
from engine.step.step_inputs import StepInputs
from engine.stopwatch import Stopwatch

if TYPE_CHECKING:
    from engine.step.step_graphs import StepGraphs


class PackedForward(Protocol):
    """A model whose steps are flat batches, such as `engine.loading.packed_model.PackedModel`."""

    device: torch.device

    def forward(self, inputs: StepInputs, paged: PagedAttention) -> Tensor:
        """Return logits [S + R, vocab_size]: S rows to sample from, then those of the columns."""
        ...


class Runner(Protocol):
    """Runs the device's part of a step: `Passes`, or one that does more before each call."""

    def move(self, moves: BlockMoves) -> None: ...

    def forward(self, inputs: StepInputs, size: StepSize | None) -> Tensor: ...


class Passes:
    def __init__(
        self,
        model: PackedForward,
        cache: KVCache,
        backend: AttentionBackend,
        graphs: StepGraphs | None = None,
    ) -> None:
        """graphs: steps as CUDA graphs; None if every step launches its kernels one by one."""
        self.model = model
        self.cache = cache
        self.backend = backend
        self.graphs = graphs
        self._mover = BlockMover(cache, backend)
        self.model_time = Stopwatch()
        """Runs during forward passes on a CPU, and while the host waits for any other device."""
        is_cpu = model.device.type == "cpu"
        self._during_forward = self.model_time if is_cpu else nullcontext()
        self.during_wait = nullcontext() if is_cpu else self.model_time

    def move(self, moves: BlockMoves) -> None:
        """Launch block moves, without waiting for them."""
        if moves:
            self._mover.launch(moves)

    def size_for(self, chunks: Sequence[Chunk], columns: Sequence[Column]) -> StepSize | None:
        """Return the size of the CUDA graph for chunks that use these columns, if there is one."""
        return None if self.graphs is None else self.graphs.size_for(chunks, columns)

    def forward(self, inputs: StepInputs, size: StepSize | None) -> Tensor:
        """Return logits [S + R, vocabulary], which the next forward pass may overwrite.

        size: of the CUDA graph to replay, to which the inputs are padded, if any.
        """
        if size is not None:
            assert self.graphs is not None, "the size is that of a graph"
            return self.graphs.replay(inputs, size)
        step = PagedStep(inputs.batches, self.cache, self.backend)
        with self._during_forward:
            return self.model.forward(inputs, step)
