"""The attention backend that runs the Triton kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from engine.attention.call import AttentionCall
from kernels.arguments import EXPANDED_DIMS, has_kernel, is_aligned
from kernels.attention import paged_decode, paged_prefill, prefill_splits
from kernels.attention.batch import PagedBatch
from kernels.attention.prefill_work import PrefillWork
from kernels.attention.split_results import scratch_numel
from kernels.attention.work_list import WorkList, make_work_list
from kernels.cache import block_copy, cache_write, rotary_cache_write, swap
from kernels.cache.cache_table import BlockKernels
from kernels.launch_plan import planned


class TritonBackend:
    """Runs decodes on the split-KV kernel and all other tokens on the prefill kernel."""

    def __init__(self, num_processors: int, max_model_len: int) -> None:
        """num_processors: streaming multiprocessors of the GPU."""
        self._num_processors = num_processors
        self._max_model_len = max_model_len
        self._write_kv = cache_write.write_kv
        self._rotary_write_kv = rotary_cache_write.rotary_write_kv
        self.block_kernels = BlockKernels(
            copy=block_copy.copy_blocks, gather=swap.gather_blocks, scatter=swap.scatter_blocks
        )
        self._decode = paged_decode.paged_decode
        self._decode_splits = planned(paged_decode.wanted_splits)
        self._prefill = paged_prefill.paged_prefill
        self._prefill_splits = prefill_splits.wanted_splits
        self._make_prefill_work = prefill_splits.prefill_work
        self._newest: list[tuple[PagedBatch, _Parts]] = []
        """The newest step's batches, one for each cache group."""
        self._expanding: TritonBackend | None = None

    def write(self, call: AttentionCall, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        key, value = aligned(call.key), aligned(call.value)
        if value.shape[-1] == 0:
            # To the kernel, the latent is a key and the rotated part of the row a value.
            key, value = key.tensor_split([call.shared_dim], -1)
            keys, values = keys.tensor_split([call.shared_dim], -1)
        if call.rotation is None:
            self._write_kv(key, value, keys, values, slots)
        else:
            # NOTE: the kernel rotates queries in place, so it must not get a copy of them.
            self._rotary_write_kv(call.query, key, value, *call.rotation, keys, values, slots)

    def attend(
        self, call: AttentionCall, keys: Tensor, values: Tensor, batch: PagedBatch
    ) -> Tensor:
        query = aligned(call.query)
        out = query.new_empty(*query.shape[:2], values.shape[3])
        first = batch.num_decodes
        parts = self._parts(batch)
        options = {
            "scale": call.scale,
            "window": call.window,
            "softcap": call.softcap,
            "sinks": call.sinks,
        }
        if first > 0:
            self._decode(
                query[:first],
                keys,
                values,
                parts.decode_tables,
                parts.decode_lens,
                work=self._decode_work(query[:first], keys, call.window, parts),
                out=out[:first],
                **options,
            )
        if first < query.shape[0]:
            self._prefill(
                query[first:],
                keys,
                values,
                parts.prompt_tables,
                parts.query_starts,
                parts.prompt_lens,
                work=self._prefill_work(query[first:], keys, call.window, parts),
                out=out[first:],
                **options,
            )
        return out

    def expanding(self, dims: tuple[int, int]) -> TritonBackend | None:
        if dims not in EXPANDED_DIMS and not has_kernel(*dims):
            return None
        if self._expanding is None:
            self._expanding = TritonBackend(self._num_processors, self._max_model_len)
        return self._expanding

    def scratch_bytes(self, call: AttentionCall, kv_dtype: torch.dtype, num_sequences: int) -> int:
        num_heads = call.query.shape[1]
        keys = torch.empty(0, 1, *call.key.shape[1:], dtype=kv_dtype)
        limits = (keys, self._num_processors, self._max_model_len)
        num_slots = max(
            paged_decode.max_slots(call.query[:num_sequences], *limits),
            prefill_splits.max_slots(call.query, *limits),
        )
        return scratch_numel(num_slots, num_heads, call.value_dim) * torch.float32.itemsize

    def _decode_work(
        self, query: Tensor, keys: Tensor, window: int | None, parts: _Parts
    ) -> WorkList:
        num_wanted = self._decode_splits(
            query, keys, self._num_processors, self._max_model_len, window
        )
        key = num_wanted, window
        if key not in parts.decode_work:
            parts.decode_work[key] = make_work_list(parts.decode_lens, num_wanted, window=window)
        return parts.decode_work[key]

    def _prefill_work(
        self, query: Tensor, keys: Tensor, window: int | None, parts: _Parts
    ) -> PrefillWork:
        """Return the work list of the other sequences, shared by all layers of the same shape."""
        key = (*query.shape, *keys.shape[2:], window)
        if key not in parts.prefill_work:
            num_splits = self._prefill_splits(
                query, keys, parts.lengths, self._num_processors, self._max_model_len, window
            )
            parts.prefill_work[key] = self._make_prefill_work(
                query, keys, parts.query_starts, parts.prompt_lens, num_splits, window=window
            )
        return parts.prefill_work[key]

    def _parts(self, batch: PagedBatch) -> _Parts:
        """Split a batch's tensors, once for all layers of its cache group.

        The work lists are the same in all groups of a step, which share the lengths.
        """
        if self._newest and self._newest[0][0].context_lens is not batch.context_lens:
            self._newest = []
        for known, parts in self._newest:
            if known is batch:
                return parts
        first = batch.num_decodes
        tables, lens = batch.block_tables, batch.context_lens
        if self._newest:
            parts = replace(
                self._newest[0][1], decode_tables=tables[:first], prompt_tables=tables[first:]
            )
        else:
            lengths = None
            if batch.spans is not None:
                lengths = [(end - start, context) for start, end, context in batch.spans[first:]]
            parts = _Parts(
                tables[:first], lens[:first], tables[first:], lens[first:], batch.query_starts,
                lengths,
            )  # fmt: skip
        self._newest.append((batch, parts))
        return parts


@dataclass(frozen=True, slots=True)
class _Parts:
    """A batch split into decodes and other sequences, with the work lists that layers share."""

    decode_tables: Tensor
    decode_lens: Tensor
    prompt_tables: Tensor
    prompt_lens: Tensor
    query_starts: Tensor
    lengths: Sequence[tuple[int, int]] | None
    """New tokens and context length of each sequence that is not a decode; None if only the device
    knows them."""
    decode_work: dict[tuple[int, int | None], WorkList] = field(default_factory=dict)
    """The decodes' work lists, by number of splits and window."""
    prefill_work: dict[tuple[int | None, ...], PrefillWork] = field(default_factory=dict)
    """The other sequences' work lists, by shapes and window."""


def aligned(rows: Tensor) -> Tensor:
    """Return rows [T, heads, dim] with strides that the kernels take, copied if need be.

    Slices of merged q, k and v are not copied.
    """
    return rows if is_aligned(rows) else rows.contiguous()
