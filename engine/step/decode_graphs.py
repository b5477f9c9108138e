"""Decode steps as captured CUDA graphs: one launch in place of hundreds.

A graph replays the very kernels that were launched while it was captured, on the same addresses.
So there is one for each of a few batch sizes (buckets); a step copies its inputs into the buffers
that the graph reads and fills the rest of the bucket with padding, and all lengths are data.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
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
    """Turns work that launches kernels into something that launches them all again."""

    def record(self, work: Work) -> Work: ...


class CudaRecorder:
    """Captures into CUDA graphs that share one memory pool, since only one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Work) -> Work:
        # Once as it is, on another stream, as capture asks: kernels are compiled, libraries set up.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            work()
        return graph.replay


class DecodeGraph:
    """The step of up to `num_rows` sequences that decode one token each."""

    def __init__(self, num_rows: int, buffers: _Buffers, replay: Work) -> None:
        self.num_rows = num_rows
        self._buffers = buffers
        self._replay = replay

    def replay(self, inputs: StepInputs) -> Tensor:
        """inputs: padded to `num_rows`. Logits [S, vocabulary] in fp32, until the next replay."""
        self._buffers.fill(inputs)
        self._replay()
        return self._buffers.logits[: len(inputs.sampled)]


class DecodeGraphs:
    """The graphs of all buckets; where the model has adapters, of steps with and without them."""

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
        """Captures all; `progress` is handed the sizes to come, and may show how far that is."""
        self._model = model
        self._cache = cache
        self._backend = backend
        self._buffers = _Buffers(
            max_rows,
            -(-max_model_len // cache.block_size),
            model.config.get_text_config().vocab_size,
            model.device,
        )
        # From the largest on, whose memory then serves the others.
        self._sizes = buckets(max_rows)
        kinds = (False, True) if model.adapter_memory is not None else (False,)
        self._graphs = {
            (size, adapts): self._record(size, recorder, adapts=adapts)
            for size in progress(self._sizes[::-1])
            for adapts in kinds
        }

    @torch.inference_mode()
    def _record(self, num_rows: int, recorder: Recorder, *, adapts: bool) -> DecodeGraph:
        inputs = self._buffers.inputs(num_rows, adapts=adapts)
        step = PagedStep(inputs.batch, self._cache, self._backend)
        logits = self._buffers.logits[:num_rows]
        replay = recorder.record(lambda: logits.copy_(self._model.forward(inputs, step)))
        return DecodeGraph(num_rows, self._buffers, replay)

    def graph_for(self, plan: StepPlan) -> DecodeGraph | None:
        """The smallest that holds the step; None for one that is not of decodes alone."""
        if not all(chunk.length == 1 and chunk.samples for chunk in plan.chunks):
            return None
        place = bisect_left(self._sizes, len(plan.chunks))
        if place == len(self._sizes):
            return None
        adapts = any(chunk.sequence.adapter for chunk in plan.chunks)
        return self._graphs[self._sizes[place], adapts]


def buckets(max_rows: int) -> list[int]:
    """Batch sizes to capture: fine where a row of padding weighs most, and `max_rows` itself."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_rows, 32)]
    return [size for size in sizes if size < max_rows] + [max_rows]


class _Buffers:
    """What the graphs read and write. At first all inputs are padding."""

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

    def inputs(self, num_rows: int, *, adapts: bool) -> StepInputs:
        """The first rows as the inputs of a step."""
        tokens = self._tokens[:, :num_rows]
        batch = PagedBatch(
            query_starts=self._query_starts,
            context_lens=self._context_lens[:num_rows],
            block_tables=self._tables[:num_rows],
            slot_mapping=tokens[2],
            spans=None,
            num_decodes=num_rows,
        )
        slots = self._adapter_slots[:num_rows] if adapts else None
        return StepInputs(tokens, self._rows[:num_rows], batch, (), adapter_slots=slots)

    def fill(self, inputs: StepInputs) -> None:
        """Tables keep old entries past a context's end, which nobody reads."""
        num_rows, num_blocks = inputs.batch.block_tables.shape
        self._tokens[:, :num_rows].copy_(inputs.tokens)
        self._context_lens[:num_rows].copy_(inputs.batch.context_lens)
        self._tables[:num_rows, :num_blocks].copy_(inputs.batch.block_tables)
        if inputs.adapter_slots is not None:
            self._adapter_slots[:num_rows].copy_(inputs.adapter_slots)
