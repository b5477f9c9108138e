"""Steps as captured CUDA graphs: one launch instead of hundreds.

A graph replays the kernels launched during its capture, with the same shapes and addresses. So one
graph is captured for each `StepSize`: batch sizes of decodes, and combinations of decodes and
prompt tokens. A step copies its inputs, padded to the size, into the buffers that the graph reads.
Lengths are data in these buffers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from core.adapter import adapter_of
from core.configuration.step_size import StepSize
from core.images import images_in
from core.plan import StepPlan
from engine.attention.backends import AttentionBackend
from engine.attention.kv_cache import KVCache
from engine.attention.paged_step import PagedStep
from engine.loading.packed_model import PackedModel
from engine.ranks.group import Group, SingleRank
from engine.step.cuda_recorder import Work
from engine.step_inputs import NO_ADAPTER, PADDING_SLOT, StepInputs
from kernels.attention.batch import PagedBatch

MAX_CAPTURE_SECONDS = 60.0
"""After this time, no further mixed steps, that is, steps with prompts, are captured. Each capture
takes some 50 ms."""


class Recorder(Protocol):
    """See `engine.step.cuda_recorder.CudaRecorder`."""

    def record(self, work: Work) -> Work: ...

    def is_launch_bound(self, work: Work) -> bool: ...


@dataclass(frozen=True, slots=True)
class StepGraph:
    """A captured step, to which all steps of up to `size` are padded."""

    size: StepSize
    _buffers: _Buffers
    _replay: Work

    def replay(self, inputs: StepInputs) -> Tensor:
        """Return logits [S, vocabulary] fp32, which the next replay overwrites.

        inputs: padded to `size`.
        """
        self._buffers.fill(inputs)
        self._replay()
        return self._buffers.logits[: len(inputs.sampled_chunks)]


class StepGraphs:
    """The graphs of all sizes. With LoRA there are two per size: with and without adapters."""

    def __init__(
        self,
        model: PackedModel,
        cache: KVCache,
        backend: AttentionBackend,
        recorder: Recorder,
        sizes: Sequence[StepSize],
        *,
        max_model_len: int,
        skips_device_bound: bool = False,
        progress: Callable[[list[StepSize]], Iterable[StepSize]] = iter,
        clock: Callable[[], float] = time.monotonic,
        group: Group | None = None,
    ) -> None:
        """Capture the graphs.

        sizes: the result of `core.configuration.step_size.graph_sizes`. Those of mixed steps are
        left out after MAX_CAPTURE_SECONDS and, with `skips_device_bound`, if the device would be
        busy even without a graph.

        progress: wraps the list of sizes, to show a progress bar. group: the ranks that share the
        model; rank 0 decides what to leave out. None: one rank.
        """
        group = group or SingleRank(model.device)
        self._model = model
        self._cache = cache
        self._backend = backend
        self._recorder = recorder
        self._buffers = _Buffers(
            max(size.num_tokens for size in sizes),
            max(size.num_sequences for size in sizes),
            -(-max_model_len // cache.block_size),
            model.config.get_text_config().vocab_size,
            model.device,
        )
        variants = (False, True) if model.adapter_memory is not None else (False,)
        self._graphs: dict[tuple[StepSize, bool], StepGraph] = {}
        self.num_timed_out = self.num_device_bound = 0
        """How many sizes of mixed steps were left out: the first number because time was up, the
        second because the device would be busy even without a graph."""
        deadline = clock() + MAX_CAPTURE_SECONDS
        # The largest first: the smaller graphs reuse its memory.
        for size in progress(list(sizes)[::-1]):
            if size.num_prompts and group.agree(clock() > deadline):
                self.num_timed_out += 1
            elif (
                size.num_prompts
                and skips_device_bound
                and not group.agree(self._is_launch_bound(size))
            ):
                self.num_device_bound += 1
            else:
                for has_adapters in variants:
                    self._graphs[size, has_adapters] = self._record(size, has_adapters)
        self.sizes = [size for size in sizes if (size, False) in self._graphs]
        """The captured sizes, smallest first."""

    def __len__(self) -> int:
        return len(self._graphs)

    def graph_for(self, plan: StepPlan) -> StepGraph | None:
        """Return the smallest graph that the step fits into; None if there is none.

        Steps that score prompt tokens need more logits than a graph computes, and a graph has no
        embeddings of images.
        """
        if any(chunk.extra_rows for chunk in plan.chunks):
            return None
        if self._model.encoder is not None and any(
            images_in(c.sequence.parts, c.start, c.end) for c in plan.chunks
        ):
            return None
        step = StepSize.of(plan.chunks)
        for size in self.sizes:
            if size.fits(step):
                has_adapters = any(adapter_of(chunk.sequence.parts) for chunk in plan.chunks)
                return self.graph(size, has_adapters=has_adapters)
        return None

    def graph(self, size: StepSize, *, has_adapters: bool) -> StepGraph:
        """Return the graph of one of `sizes`."""
        return self._graphs[size, has_adapters]

    @torch.inference_mode()
    def _record(self, size: StepSize, has_adapters: bool) -> StepGraph:
        replay = self._recorder.record(self._forward(size, has_adapters))
        return StepGraph(size, self._buffers, replay)

    @torch.inference_mode()
    def _is_launch_bound(self, size: StepSize) -> bool:
        return self._recorder.is_launch_bound(self._forward(size, has_adapters=False))

    def _forward(self, size: StepSize, has_adapters: bool) -> Work:
        """Return a function that computes the logits of the buffers' first rows."""
        logits = self._buffers.logits[: size.num_sequences]

        def forward() -> Tensor:
            # A new batch each time: backends keep what they compute for a batch, and the graph must
            # compute it again.
            inputs = self._buffers.inputs(size, has_adapters=has_adapters)
            step = PagedStep(inputs.batch, self._cache, self._backend)
            return logits.copy_(self._model.forward(inputs, step))

        return forward


class _Buffers:
    """The tensors that the graphs read and write. Initially all inputs are padding."""

    def __init__(
        self,
        max_tokens: int,
        max_sequences: int,
        max_blocks: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        int32 = partial(torch.zeros, dtype=torch.int32, device=device)
        self.logits = torch.empty(max_sequences, vocab_size, dtype=torch.float32, device=device)
        self._tokens = torch.zeros(3, max_tokens, dtype=torch.int64, device=device)
        self._tokens[2] = PADDING_SLOT
        self._sampled_rows = torch.zeros(max_sequences, dtype=torch.int64, device=device)
        self._context_lens = int32(max_sequences)
        self._tables = int32(max_sequences, max_blocks)
        self._query_starts = int32(max_sequences + 1)
        self._adapter_slots = torch.full((max_tokens,), NO_ADAPTER, device=device)

    def inputs(self, size: StepSize, *, has_adapters: bool) -> StepInputs:
        """Return views of the buffers as the inputs of a step."""
        tokens = self._tokens[:, : size.num_tokens]
        batch = PagedBatch(
            query_starts=self._query_starts[: size.num_prompts + 1],
            context_lens=self._context_lens[: size.num_sequences],
            block_tables=self._tables[: size.num_sequences],
            slot_mapping=tokens[2],
            spans=None,
            num_decodes=size.num_decodes,
        )
        return StepInputs(
            tokens,
            self._sampled_rows[: size.num_sequences],
            batch,
            (),
            adapter_slots=self._adapter_slots[: size.num_tokens] if has_adapters else None,
        )

    def fill(self, inputs: StepInputs) -> None:
        """Copy a step's padded inputs into the buffers.

        Block tables keep stale entries past a context's end, which no kernel reads.
        """
        batch = inputs.batch
        num_sequences, num_blocks = batch.block_tables.shape
        self._tokens[:, : inputs.tokens.shape[1]].copy_(inputs.tokens)
        self._sampled_rows[:num_sequences].copy_(inputs.sampled_rows)
        self._context_lens[:num_sequences].copy_(batch.context_lens)
        self._tables[:num_sequences, :num_blocks].copy_(batch.block_tables)
        if len(batch.query_starts) > 1:
            self._query_starts[: len(batch.query_starts)].copy_(batch.query_starts)
        if inputs.adapter_slots is not None:
            self._adapter_slots[: len(inputs.adapter_slots)].copy_(inputs.adapter_slots)
