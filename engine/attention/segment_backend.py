"""The attention backend that gives a token the same bits, whatever else a step computes."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.call import AttentionCall
from engine.attention.triton_backend import TritonBackend, aligned
from kernels.attention.batch import PagedBatch
from kernels.attention.paged_prefill import paged_prefill
from kernels.attention.prefill_splits import max_segment_slots, segment_work, wanted_segments
from kernels.attention.prefill_work import PrefillWork
from kernels.attention.split_results import scratch_numel


class SegmentBackend(TritonBackend):
    """Runs all tokens, decodes too, on the prefill kernel in segments of keys.

    See `kernels.attention.segments`.
    """

    def __init__(self, num_processors: int, max_model_len: int) -> None:
        super().__init__(num_processors, max_model_len)
        self._last: tuple[PagedBatch, _Lists] | None = None

    def attend(
        self, call: AttentionCall, keys: Tensor, values: Tensor, batch: PagedBatch
    ) -> Tensor:
        query = aligned(call.query)
        if self._last is None or self._last[0] is not batch:
            self._last = batch, _Lists(batch)
        lists = self._last[1]
        return paged_prefill(
            query,
            keys,
            values,
            batch.block_tables,
            lists.query_starts,
            batch.context_lens,
            scale=call.scale,
            work=self._work(query, keys, call.window, lists, batch),
            window=call.window,
            softcap=call.softcap,
            sinks=call.sinks,
        )

    def scratch_bytes(self, call: AttentionCall, kv_dtype: torch.dtype, num_sequences: int) -> int:
        num_heads, head_dim = call.query.shape[1:]
        keys = torch.empty(0, 1, *call.key.shape[1:], dtype=kv_dtype)
        num_slots = max_segment_slots(call.query, keys, self._max_model_len, self._num_processors)
        return scratch_numel(num_slots, num_heads, head_dim) * torch.float32.itemsize

    def _work(
        self, query: Tensor, keys: Tensor, window: int | None, lists: _Lists, batch: PagedBatch
    ) -> PrefillWork:
        """Return the work list, which all layers of the same shape share."""
        key = (*query.shape, *keys.shape[2:], window)
        if key not in lists.work:
            longest = self._max_model_len
            if batch.spans is not None:
                longest = max((context for _, _, context in batch.spans), default=0)
            num_splits = wanted_segments(query, keys, longest, self._num_processors, window)
            lists.work[key] = segment_work(
                query, keys, lists.query_starts, batch.context_lens, num_splits, window=window
            )
        return lists.work[key]


class _Lists:
    """What the layers of a step share."""

    def __init__(self, batch: PagedBatch) -> None:
        first = batch.num_decodes
        starts = batch.query_starts
        decodes = torch.arange(first, dtype=starts.dtype, device=starts.device)
        self.query_starts = torch.cat([decodes, starts + first])
        """The first row of each sequence, decodes too."""
        self.work: dict[tuple[int | None, ...], PrefillWork] = {}
