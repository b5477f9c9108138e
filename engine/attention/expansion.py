"""The sequences of a step whose latents are expanded to K and V of every head.

```
cache      | block 7 of a | block 2 of a | block 5 of b |     rows that all heads share
                  ▼              ▼              ▼             gathered and expanded in each layer
scratch    | block 0      | block 1      | block 2      |     K and V of every head
```

They read the scratch by block tables of their own. All other sequences, decodes among them, read
the latents as they lie in the cache. A sequence's own lengths decide, whatever else the step
computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, chain, pairwise

import torch
from torch import Tensor

from engine.attention.backends import AttentionBackend
from engine.attention.call import AttentionCall, Expands
from engine.attention.kv_cache import KVCache
from kernels.attention.batch import PagedBatch
from kernels.attention.sdpa import Scratch


def expansion_of(
    batch: PagedBatch,
    cache: KVCache,
    backend: AttentionBackend,
    dims: tuple[int, int],
    expands: Expands,
) -> StepExpansion | None:
    """Return the expansion of a step with this batch, as `PagedAttention.expansion` says.

    Steps whose lengths are only on the device, CUDA graphs, expand nothing.
    """
    expanding = backend.expanding(dims)
    if expanding is None or batch.spans is None:
        return None
    size, contexts = cache.block_size, [0] * batch.num_decodes
    for start, end, context in batch.spans[batch.num_decodes :]:
        rows = -(-context // size) * size
        contexts.append(context if expands(end - start, context, rows) else 0)
    return StepExpansion(batch, cache, backend, expanding, contexts) if any(contexts) else None


class StepExpansion:
    """See `engine.attention.call.Expansion`."""

    def __init__(
        self,
        batch: PagedBatch,
        cache: KVCache,
        backend: AttentionBackend,
        expanding: AttentionBackend,
        contexts: Sequence[int],
    ) -> None:
        """contexts: the context length of each sequence of the batch; 0 if it is not expanded."""
        self._step, self._cache, self._scratch = batch, cache, Scratch()
        self._backend, self._expanding = backend, expanding
        counts = [-(-context // cache.block_size) for context in contexts]
        self._blocks = torch.cat(
            [batch.block_tables[row, :count] for row, count in enumerate(counts) if count]
        )
        """The blocks of the cache that are expanded, in the order of the scratch."""
        self._expanded = _expanded(batch, contexts, counts)
        self.others: Tensor | None = None
        if rows := [row for row, context in enumerate(contexts) if context == 0]:
            self.others, self._of_others = _selected(batch, rows)

    def attend(self, call: AttentionCall, expand: Callable[[Tensor], Tensor]) -> Tensor:
        latents, own_values = (
            caches[call.layer] for caches in (self._cache.keys, self._cache.own_values)
        )
        self._backend.write(call, latents, own_values, self._step.slot_mapping)
        rows = self._scratch.gather("latents", latents, self._blocks, call.query.dtype)[:, 0]
        blocks = expand(rows).unflatten(0, (-1, self._cache.block_size))
        keys, values = blocks.tensor_split([call.query.shape[2]], -1)
        return self._expanding.attend(call, keys, values, self._expanded)

    def attend_others(self, call: AttentionCall) -> Tensor:
        keys, values = self._cache.keys[call.layer], self._cache.values[call.layer]
        return self._backend.attend(call, keys, values, self._of_others)


def _expanded(batch: PagedBatch, contexts: Sequence[int], counts: Sequence[int]) -> PagedBatch:
    """Return all sequences with these contexts, of `counts` blocks, which follow each other.

    Attention computes nothing for a sequence with a context of 0.
    """
    spans = batch.host_spans()
    starts = [*(start for start, _, _ in spans), spans[-1][1]]
    firsts = list(accumulate(counts, initial=0))[:-1]
    device = batch.context_lens.device
    lens, first_blocks, query_starts = _upload([contexts, firsts, starts], device)
    blocks = torch.arange(max(counts), dtype=torch.int32, device=device)
    return PagedBatch(
        query_starts,
        lens,
        first_blocks[:, None] + blocks,
        batch.slot_mapping,
        tuple((*span[:2], context) for span, context in zip(spans, contexts, strict=True)),
    )


def _selected(batch: PagedBatch, rows: Sequence[int]) -> tuple[Tensor, PagedBatch]:
    """Return the tokens of these sequences, [R] int64, and their batch. Decodes are selected."""
    spans = [batch.host_spans()[row] for row in rows]
    tokens = list(chain.from_iterable(range(start, end) for start, end, _ in spans))
    ends = list(accumulate((end - start for start, end, _ in spans), initial=0))
    starts = [end - batch.num_decodes for end in ends[batch.num_decodes :]]
    places, selected, query_starts = _upload([tokens, rows, starts], batch.context_lens.device)
    own_spans = ((*ends, span[2]) for ends, span in zip(pairwise(ends), spans, strict=True))
    return places.long(), PagedBatch(
        query_starts,
        batch.context_lens.index_select(0, selected),
        batch.block_tables.index_select(0, selected),
        batch.slot_mapping,
        tuple(own_spans),
        batch.num_decodes,
    )


def _upload(lists: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """Return each list as int32 on the device. They go in one copy, which waits for nothing."""
    numbers = torch.tensor(
        list(chain.from_iterable(lists)), dtype=torch.int32, pin_memory=device.type == "cuda"
    )
    copied = numbers.to(device, non_blocking=True)
    return list(copied.split_with_sizes([len(numbers) for numbers in lists]))
