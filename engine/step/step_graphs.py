"""Steps as captured CUDA graphs: one launch instead of hundreds.

A graph replays the kernels launched during its capture, with the same shapes and addresses. So one
graph is captured for each `StepSize`: batch sizes of decodes, and combinations of decodes and
prompt tokens. A step copies its inputs, padded to the size, into the buffers that the graph reads.
Lengths are data in these buffers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Protocol

import torch
from torch import Tensor

from core.configuration.step_size import StepSize
from core.plan import Chunk
from engine.attention.backends import AttentionBackend
from engine.attention.call import PagedAttention
from engine.attention.kv_cache import KVCache
from engine.attention.paged_step import PagedStep
from engine.staging import Slot
from engine.step.column import Column, PerTokenColumn
from engine.step.cuda_recorder import Work
from engine.step.step_inputs import PADDING_SLOT, StepInputs, in_groups
from kernels.attention.batch import PagedBatch

MAX_CAPTURE_SECONDS = 60.0
"""After this time, no further mixed steps, that is, steps with prompts, are captured. Each capture
takes some 50 ms."""


class Recorder(Protocol):
    """See `engine.step.cuda_recorder.CudaRecorder`."""

    def record(self, work: Work) -> Work: ...

    def is_launch_bound(self, work: Work) -> bool: ...


class CapturedModel(Protocol):
    """A model that runs as CUDA graphs, such as `engine.loading.packed_model.PackedModel`."""

    device: torch.device
    columns: list[PerTokenColumn]
    """The columns that its layers take part in."""

    @property
    def vocab_size(self) -> int: ...

    def forward(self, inputs: StepInputs, paged: PagedAttention) -> Tensor: ...


Variant = tuple[PerTokenColumn, ...]
"""The columns that the steps of a graph use."""


class StepGraphs:
    """The graphs of all sizes: one for each set of the model's columns."""

    def __init__(
        self,
        model: CapturedModel,
        cache: KVCache,
        backend: AttentionBackend,
        recorder: Recorder,
        sizes: Sequence[StepSize],
        *,
        max_model_len: int,
        skips_device_bound: bool = False,
        progress: Callable[[list[StepSize]], Iterable[StepSize]] = iter,
        clock: Callable[[], float] = time.monotonic,
        agree: Callable[[float], float] = lambda number: number,
    ) -> None:
        """Capture the graphs.

        sizes: the result of `core.configuration.step_size.graph_sizes`. Those of mixed steps are
        left out after MAX_CAPTURE_SECONDS and, with `skips_device_bound`, if the device would be
        busy even without a graph.

        progress: wraps the list of sizes, to show a progress bar. agree: makes a number the same in
        all processes that share the model, so that they leave out the same sizes.
        """
        self._model = model
        self._cache = cache
        self._backend = backend
        self._recorder = recorder
        self._buffers = _Buffers(
            max(size.num_tokens for size in sizes),
            max(size.num_sequences for size in sizes),
            max(size.num_rows for size in sizes),
            -(-max_model_len // cache.block_size),
            len(cache.groups),
            model.vocab_size,
            model.columns,
            model.device,
        )
        self._replays: dict[tuple[StepSize, frozenset[str]], Work] = {}
        """The graphs by their size and the names of their columns."""
        self.num_timed_out = self.num_device_bound = 0
        """How many sizes of mixed steps were left out: the first number because time was up, the
        second because the device would be busy even without a graph."""
        deadline = clock() + MAX_CAPTURE_SECONDS
        # The largest first: the smaller graphs reuse its memory.
        for size in progress(list(sizes)[::-1]):
            if size.num_prompts and agree(clock() > deadline):
                self.num_timed_out += 1
            elif size.num_prompts and skips_device_bound and not agree(self._is_launch_bound(size)):
                self.num_device_bound += 1
            else:
                for variant in _variants(model.columns):
                    names = frozenset(column.name for column in variant)
                    self._replays[size, names] = self._record(size, variant)
        self.sizes = [size for size in sizes if (size, frozenset[str]()) in self._replays]
        """The captured sizes, smallest first."""

    def __len__(self) -> int:
        return len(self._replays)

    def size_for(self, chunks: Sequence[Chunk], columns: Sequence[Column] = ()) -> StepSize | None:
        """Return the size of the smallest graph that the chunks fit into; None if there is none.

        columns: those that the chunks use.
        """
        if not all(column.fits_graph(chunks) for column in columns):
            return None
        num_extra_rows = sum(column.num_extra_rows(chunks) for column in columns)
        step = replace(StepSize.of(chunks), num_extra_rows=num_extra_rows)
        return next((size for size in self.sizes if size.fits(step)), None)

    def replay(self, inputs: StepInputs, size: StepSize) -> Tensor:
        """Return logits [S + R, vocabulary] fp32, which the next replay overwrites.

        inputs: padded to `size`, which is one of `sizes`.
        """
        rows = inputs.logit_rows
        self._buffers.fill(inputs, rows, size)
        self._replays[size, frozenset(inputs.per_token)]()
        is_padded = rows is inputs.sampled_rows
        return self._buffers.logits[: len(inputs.sampled_chunks) if is_padded else len(rows)]

    @torch.inference_mode()
    def _record(self, size: StepSize, variant: Variant) -> Work:
        return self._recorder.record(self._forward(size, variant))

    @torch.inference_mode()
    def _is_launch_bound(self, size: StepSize) -> bool:
        return self._recorder.is_launch_bound(self._forward(size, ()))

    def _forward(self, size: StepSize, variant: Variant) -> Work:
        """Return a function that computes the logits of the buffers' first rows."""
        logits = self._buffers.logits[: size.num_rows]

        def forward() -> Tensor:
            # A new batch each time: backends keep what they compute for a batch, and the graph must
            # compute it again.
            inputs = self._buffers.inputs(size, variant)
            step = PagedStep(inputs.batches, self._cache, self._backend)
            return logits.copy_(self._model.forward(inputs, step))

        return forward


def _variants(columns: Sequence[PerTokenColumn]) -> Iterator[Variant]:
    """Yield every set of the columns, the empty one first."""
    for count in range(len(columns) + 1):
        yield from combinations(columns, count)


class _Buffers:
    """The tensors that the graphs read and write. Initially all inputs are padding."""

    def __init__(
        self,
        max_tokens: int,
        max_sequences: int,
        max_rows: int,
        max_blocks: int,
        num_groups: int,
        vocab_size: int,
        columns: Sequence[PerTokenColumn],
        device: torch.device,
    ) -> None:
        int32 = partial(torch.zeros, dtype=torch.int32, device=device)
        self.logits = torch.empty(max_rows, vocab_size, dtype=torch.float32, device=device)
        self._tokens = torch.zeros(2 + num_groups, max_tokens, dtype=torch.int64, device=device)
        self._tokens[2:] = PADDING_SLOT
        self._rows = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._context_lens = int32(max_sequences)
        self._tables = int32(num_groups, max_sequences, max_blocks)
        self._query_starts = int32(max_sequences + 1)
        self._per_token = {
            column.name: torch.full((max_tokens,), column.padding, device=device)
            for column in columns
        }

    def inputs(self, size: StepSize, variant: Variant) -> StepInputs:
        """Return views of the buffers as the inputs of a step."""
        tokens = self._tokens[:, : size.num_tokens]
        tables = [table[: size.num_sequences] for table in self._tables]
        batch = PagedBatch(
            query_starts=self._query_starts[: size.num_prompts + 1],
            context_lens=self._context_lens[: size.num_sequences],
            block_tables=tables[0],
            slot_mapping=tokens[2],
            spans=None,
            num_decodes=size.num_decodes,
        )
        columns = [
            column.of(Slot(self._per_token[column.name][: size.num_tokens])) for column in variant
        ]
        batches = in_groups(batch, tokens, tables)
        rows = self._rows[: size.num_rows]
        return StepInputs(tokens, rows, batches, columns=columns)

    def fill(self, inputs: StepInputs, rows: Tensor, size: StepSize) -> None:
        """Copy a step's inputs, padded to `size`, into the buffers.

        rows: its `logit_rows`; further ones are those of the first token. Block tables keep stale
        entries past a context's end, which no kernel reads.
        """
        batch = inputs.batch
        num_sequences, num_blocks = batch.block_tables.shape
        self._tokens[:, : inputs.tokens.shape[1]].copy_(inputs.tokens)
        self._rows[: len(rows)].copy_(rows)
        if len(rows) < size.num_rows:
            self._rows[len(rows) : size.num_rows].zero_()
        self._context_lens[:num_sequences].copy_(batch.context_lens)
        for table, group in zip(self._tables, inputs.batches, strict=True):
            table[:num_sequences, :num_blocks].copy_(group.block_tables)
        if len(batch.query_starts) > 1:
            self._query_starts[: len(batch.query_starts)].copy_(batch.query_starts)
        for name, numbers in inputs.per_token.items():
            self._per_token[name][: len(numbers)].copy_(numbers)
