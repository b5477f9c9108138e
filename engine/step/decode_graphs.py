"""Decode steps as captured CUDA graphs: one launch instead of hundreds.

A graph replays the kernels launched during its capture, with the same shapes and addresses. So one
graph is captured per bucket, a small range of batch sizes. A step copies its inputs into the
buffers that the graph reads and pads them to the bucket's size. Context lengths are data in these
buffers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from core.plan import StepPlan
from engine.attention.backends import AttentionBackend
from engine.attention.kv_cache import KVCache
from engine.attention.paged_step import PagedStep
from engine.inputs import NO_ADAPTER, PADDING_SLOT, StepInputs
from engine.loading.packed_model import PackedModel
from kernels.batch import PagedBatch

Work = Callable[[], object]


class Recorder(Protocol):
    """Records the kernels that a function launches and returns a function that replays them."""

    def record(self, work: Work) -> Work: ...


class CudaRecorder:
    """Captures CUDA graphs. They share one memory pool, since only one runs at a time.

    They also share one stream: cuBLAS keeps a workspace for each stream that it has seen.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def record(self, work: Work) -> Work:
        """Capture `work`. Raises RuntimeError if it waits for the device.

        The warm-up compiles kernels and sets up libraries. It also finds code that waits for the
        device. If the capture itself failed on such code, torch's memory pool would stay open and
        later frees would fail.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), _no_synchronization():
            work()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            work()
        return graph.replay


@contextmanager
def _no_synchronization() -> Iterator[None]:
    """Make torch raise RuntimeError where the host would wait for the device."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


class DecodeGraph:
    """A captured step of up to `num_rows` sequences that decode one token each."""

    def __init__(self, num_rows: int, buffers: _Buffers, replay: Work) -> None:
        self.num_rows = num_rows
        self._buffers = buffers
        self._replay = replay

    def replay(self, inputs: StepInputs) -> Tensor:
        """Return logits [S, vocabulary] fp32, which the next replay overwrites.

        inputs: padded to `num_rows`.
        """
        self._buffers.fill(inputs)
        self._replay()
        return self._buffers.logits[: len(inputs.sampled)]


class DecodeGraphs:
    """The graphs of all buckets. With LoRA there are two per bucket: with and without adapters."""

    def __init__(
        self,
        model: PackedModel,
        cache: KVCache,
        backend: AttentionBackend,
        recorder: Recorder,
        *,
        max_rows: int,
        max_model_len: int,
        progress: Callable[[list[int]], Iterable[int]] = iter,
    ) -> None:
        """Capture all graphs. `progress` wraps the list of sizes, to show a progress bar."""
        self._model = model
        self._cache = cache
        self._backend = backend
        self._buffers = _Buffers(
            max_rows,
            -(-max_model_len // cache.block_size),
            model.config.get_text_config().vocab_size,
            model.device,
        )
        # The largest first: the smaller graphs reuse its memory.
        self._sizes = buckets(max_rows)
        variants = (False, True) if model.adapter_memory is not None else (False,)
        self._graphs = {
            (size, has_adapters): self._record(size, recorder, has_adapters=has_adapters)
            for size in progress(self._sizes[::-1])
            for has_adapters in variants
        }

    @torch.inference_mode()
    def _record(self, num_rows: int, recorder: Recorder, *, has_adapters: bool) -> DecodeGraph:
        logits = self._buffers.logits[:num_rows]

        def forward() -> Tensor:
            # A new batch each time: backends keep what they compute for a batch, and the graph must
            # compute it again.
            inputs = self._buffers.inputs(num_rows, has_adapters=has_adapters)
            step = PagedStep(inputs.batch, self._cache, self._backend)
            return logits.copy_(self._model.forward(inputs, step))

        return DecodeGraph(num_rows, self._buffers, recorder.record(forward))

    def graph_for(self, plan: StepPlan) -> DecodeGraph | None:
        """Return the smallest graph that fits; None if the plan is too large or not all decodes."""
        if not all(chunk.length == 1 and chunk.samples for chunk in plan.chunks):
            return None
        bucket = bisect_left(self._sizes, len(plan.chunks))
        if bucket == len(self._sizes):
            return None
        has_adapters = any(chunk.sequence.adapter for chunk in plan.chunks)
        return self._graphs[self._sizes[bucket], has_adapters]


def buckets(max_rows: int) -> list[int]:
    """Return the batch sizes to capture, up to `max_rows`.

    Small sizes are close together, since a padding row costs most there.
    """
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_rows, 32)]
    return [size for size in sizes if size < max_rows] + [max_rows]


class _Buffers:
    """The tensors that the graphs read and write. Initially all inputs are padding."""

    def __init__(
        self, max_rows: int, max_blocks: int, vocab_size: int, device: torch.device
    ) -> None:
        self.logits = torch.empty(max_rows, vocab_size, dtype=torch.float32, device=device)
        self._tokens = torch.zeros(3, max_rows, dtype=torch.int64, device=device)
        self._tokens[2] = PADDING_SLOT
        self._context_lens = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._tables = torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=device)
        self._rows = torch.arange(max_rows, device=device)
        self._query_starts = torch.zeros(1, dtype=torch.int32, device=device)
        self._adapter_slots = torch.full((max_rows,), NO_ADAPTER, device=device)

    def inputs(self, num_rows: int, *, has_adapters: bool) -> StepInputs:
        """Return views of the first `num_rows` rows as the inputs of a step."""
        tokens = self._tokens[:, :num_rows]
        batch = PagedBatch(
            query_starts=self._query_starts,
            context_lens=self._context_lens[:num_rows],
            block_tables=self._tables[:num_rows],
            slot_mapping=tokens[2],
            spans=None,
            num_decodes=num_rows,
        )
        slots = self._adapter_slots[:num_rows] if has_adapters else None
        return StepInputs(tokens, self._rows[:num_rows], batch, (), adapter_slots=slots)

    def fill(self, inputs: StepInputs) -> None:
        """Copy a step's inputs into the buffers.

        Block tables keep stale entries past a context's end, which no kernel reads.
        """
        num_rows, num_blocks = inputs.batch.block_tables.shape
        self._tokens[:, :num_rows].copy_(inputs.tokens)
        self._context_lens[:num_rows].copy_(inputs.batch.context_lens)
        self._tables[:num_rows, :num_blocks].copy_(inputs.batch.block_tables)
        if inputs.adapter_slots is not None:
            self._adapter_slots[:num_rows].copy_(inputs.adapter_slots)
