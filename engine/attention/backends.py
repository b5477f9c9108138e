"""Which functions write, read and move the KV cache: Triton's on CUDA, C++ on a CPU, or torch's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from core.sizing import LayerShape
from engine.attention.call import AttentionCall
from kernels import torch_cache
from kernels.batch import PagedBatch
from kernels.cache_table import CacheTable
from kernels.cpu import attention as cpu_attention
from kernels.cpu import cache as cpu_cache
from kernels.cpu.attention import MAX_DIM
from kernels.cpu.library import SUFFIXES, WIDTH, what_is_lacking
from kernels.paged_arguments import BLOCK_SIZES, HEAD_DIMS, is_aligned
from kernels.sdpa import Scratch, paged_attention


class AttentionBackend(Protocol):
    """One layer's work. keys, values: [num_blocks, block_size, kv_heads, head_dim]."""

    def write(self, call: AttentionCall, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Puts the new K and V of `call` into their slots [T]."""
        ...

    def attend(
        self, call: AttentionCall, keys: Tensor, values: Tensor, batch: PagedBatch
    ) -> Tensor:
        """Returns [T, heads, value_dim]."""
        ...

    def copy_blocks(self, table: CacheTable, pairs: Tensor) -> None:
        """In all layers, block pairs[p, 0] is copied to block pairs[p, 1]."""
        ...

    def gather_blocks(self, table: CacheTable, block_ids: Tensor, staging: Tensor) -> None:
        """Row b of `staging` becomes block block_ids[b] of all layers."""
        ...

    def scatter_blocks(self, table: CacheTable, block_ids: Tensor, staging: Tensor) -> None:
        """Block block_ids[b] of all layers becomes row b of `staging`."""
        ...


def make_backend(
    device: torch.device,
    shapes: Sequence[LayerShape],
    block_size: int,
    max_model_len: int,
    kv_dtype: torch.dtype,
) -> tuple[AttentionBackend, tuple[str, ...]]:
    """The fastest backend that computes these layers, and a note where that is not the obvious.

    max_model_len: no context is longer.
    """
    if device.type != "cuda":
        reason = _what_cpp_lacks(shapes, kv_dtype)
        if reason is None:
            return CpuBackend(), ()
        return TorchBackend(), (f"attention runs on torch's SDPA, slowly: {reason}",)
    reason = _what_triton_lacks(shapes, block_size)
    if reason is not None:
        return TorchBackend(), (f"attention runs on torch's SDPA, slowly: {reason}",)
    num_processors = torch.cuda.get_device_properties(device).multi_processor_count
    return TritonBackend(num_processors, max_model_len), ()


class TorchBackend:
    """Any shape on any device."""

    def __init__(self) -> None:
        self._scratch = Scratch()

    def write(self, call: AttentionCall, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        torch_cache.write_kv(call.key, call.value, keys, values, slots)

    def copy_blocks(self, table: CacheTable, pairs: Tensor) -> None:
        torch_cache.copy_blocks(table, pairs)

    def gather_blocks(self, table: CacheTable, block_ids: Tensor, staging: Tensor) -> None:
        torch_cache.gather_blocks(table, block_ids, staging)

    def scatter_blocks(self, table: CacheTable, block_ids: Tensor, staging: Tensor) -> None:
        torch_cache.scatter_blocks(table, block_ids, staging)

    def attend(
        self, call: AttentionCall, keys: Tensor, values: Tensor, batch: PagedBatch
    ) -> Tensor:
        return paged_attention(
            call.query,
            keys,
            values,
            batch,
            self._scratch,
            scale=call.scale,
            window=call.window,
            softcap=call.softcap,
            sinks=call.sinks,
        )


class CpuBackend(TorchBackend):
    """The C++ kernels; blocks are copied and swapped by torch."""

    def write(self, call: AttentionCall, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        cpu_cache.write_kv(_dense(call.key), _dense(call.value), keys, values, slots)

    def attend(
        self, call: AttentionCall, keys: Tensor, values: Tensor, batch: PagedBatch
    ) -> Tensor:
        return cpu_attention.paged_attention(
            _dense(call.query),
            keys,
            values,
            batch,
            scale=call.scale,
            window=call.window,
            softcap=call.softcap,
            sinks=call.sinks,
        )


class TritonBackend:
    """Rows that decode with split-KV, the others with the variable-length prefill kernel."""

    def __init__(self, num_processors: int, max_model_len: int) -> None:
        # Triton is imported where its kernels run, so that the CPU does without it.
        from kernels import (
            block_copy,
            cache_write,
            configurations,
            paged_decode,
            paged_prefill,
            swap,
        )

        self._num_processors = num_processors
        self._max_model_len = max_model_len
        self._write_kv = cache_write.write_kv
        self._copy_blocks = block_copy.copy_blocks
        self._gather_blocks = swap.gather_blocks
        self._scatter_blocks = swap.scatter_blocks
        self._num_splits = configurations.num_splits
        self._decode = paged_decode.paged_decode
        self._prefill = paged_prefill.paged_prefill
        self._newest: tuple[PagedBatch, _Parts] | None = None

    def write(self, call: AttentionCall, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        self._write_kv(_aligned(call.key), _aligned(call.value), keys, values, slots)

    def copy_blocks(self, table: CacheTable, pairs: Tensor) -> None:
        self._copy_blocks(table, pairs)

    def gather_blocks(self, table: CacheTable, block_ids: Tensor, staging: Tensor) -> None:
        self._gather_blocks(table, block_ids, staging)

    def scatter_blocks(self, table: CacheTable, block_ids: Tensor, staging: Tensor) -> None:
        self._scatter_blocks(table, block_ids, staging)

    def attend(
        self, call: AttentionCall, keys: Tensor, values: Tensor, batch: PagedBatch
    ) -> Tensor:
        query = _aligned(call.query)
        out = torch.empty_like(query)
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
                # Not by the contexts at hand: each number of splits is a kernel to compile, and
                # capturing the graphs has compiled all that this can give.
                num_splits=self._num_splits(
                    first, keys.shape[2], self._num_processors, self._max_model_len
                ),
                out=out[:first],
                **options,
            )
        if first < query.shape[0]:
            self._prefill(
                query[first:],
                keys,
                values,
                parts.prompt_tables,
                batch.query_starts,
                parts.prompt_lens,
                out=out[first:],
                **options,
            )
        return out

    def _parts(self, batch: PagedBatch) -> _Parts:
        """Made once for all layers of a step."""
        if self._newest is None or self._newest[0] is not batch:
            first = batch.num_decodes
            tables, lens = batch.block_tables, batch.context_lens
            parts = _Parts(tables[:first], lens[:first], tables[first:], lens[first:])
            self._newest = batch, parts
        return self._newest[1]


class _Parts(NamedTuple):
    """Views of a batch's tensors: of the sequences that decode, and of the others."""

    decode_tables: Tensor
    decode_lens: Tensor
    prompt_tables: Tensor
    prompt_lens: Tensor


def _aligned(rows: Tensor) -> Tensor:
    """[T, heads, dim] with strides that the kernels take; slices of merged q, k and v have them."""
    return rows if is_aligned(rows) else rows.contiguous()


def _dense(rows: Tensor) -> Tensor:
    """[T, heads, dim] with dims side by side."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _what_cpp_lacks(shapes: Sequence[LayerShape], kv_dtype: torch.dtype) -> str | None:
    if kv_dtype not in SUFFIXES:
        return f"a KV cache of {str(kv_dtype).removeprefix('torch.')} is for GPUs"
    for shape in shapes:
        for dim in (shape.key_dim, shape.value_dim):
            if dim % WIDTH or dim > MAX_DIM:
                return f"a head dim of {dim} is no multiple of {WIDTH} up to {MAX_DIM}"
    return what_is_lacking()


def _what_triton_lacks(shapes: Sequence[LayerShape], block_size: int) -> str | None:
    if block_size not in BLOCK_SIZES:
        return f"option.block_size={block_size} is none of {BLOCK_SIZES}"
    for shape in shapes:
        if shape.key_dim != shape.value_dim or shape.key_dim not in HEAD_DIMS:
            return f"head dims {shape.key_dim} and {shape.value_dim} are not one of {HEAD_DIMS}"
    return None
