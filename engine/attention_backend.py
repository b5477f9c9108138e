"""Which functions write and read the KV cache: Triton kernels on CUDA, torch elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.attention import AttentionCall
from engine.kv_cache import LayerShape
from kernels.batch import PagedBatch
from kernels.paged_arguments import BLOCK_SIZES, HEAD_DIMS, is_aligned
from kernels.sdpa import Scratch, paged_attention
from kernels.torch_cache import write_kv


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


def make_backend(
    device: torch.device, shapes: Sequence[LayerShape], block_size: int
) -> tuple[AttentionBackend, tuple[str, ...]]:
    """The fastest backend that computes these layers, and a note where that is not the obvious."""
    if device.type != "cuda":
        return TorchBackend(), ()
    reason = _what_triton_lacks(shapes, block_size)
    if reason is not None:
        return TorchBackend(), (f"attention runs on torch's SDPA, slowly: {reason}",)
    return TritonBackend(torch.cuda.get_device_properties(device).multi_processor_count), ()


class TorchBackend:
    """Any shape on any device."""

    def __init__(self) -> None:
        self._scratch = Scratch()

    def write(self, call: AttentionCall, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        write_kv(call.key, call.value, keys, values, slots)

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


class TritonBackend:
    """Decode steps with split-KV, everything else with the variable-length prefill kernel."""

    def __init__(self, num_processors: int) -> None:
        # Triton is imported where its kernels run, so that the CPU does without it.
        from kernels import cache_write, configurations, paged_decode, paged_prefill

        self._num_processors = num_processors
        self._write_kv = cache_write.write_kv
        self._num_splits = configurations.num_splits
        self._decode = paged_decode.paged_decode
        self._prefill = paged_prefill.paged_prefill

    def write(self, call: AttentionCall, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        self._write_kv(_aligned(call.key), _aligned(call.value), keys, values, slots)

    def attend(
        self, call: AttentionCall, keys: Tensor, values: Tensor, batch: PagedBatch
    ) -> Tensor:
        query = _aligned(call.query)
        if query.shape[0] == len(batch.spans):
            longest = max(context for _, _, context in batch.spans)
            return self._decode(
                query,
                keys,
                values,
                batch.block_tables,
                batch.context_lens,
                scale=call.scale,
                num_splits=self._num_splits(
                    len(batch.spans), keys.shape[2], self._num_processors, longest
                ),
                window=call.window,
                softcap=call.softcap,
                sinks=call.sinks,
            )
        return self._prefill(
            query,
            keys,
            values,
            batch.block_tables,
            batch.query_starts,
            batch.context_lens,
            scale=call.scale,
            window=call.window,
            softcap=call.softcap,
            sinks=call.sinks,
        )


def _aligned(rows: Tensor) -> Tensor:
    """[T, heads, dim] with strides that the kernels take; slices of merged q, k and v have them."""
    return rows if is_aligned(rows) else rows.contiguous()


def _what_triton_lacks(shapes: Sequence[LayerShape], block_size: int) -> str | None:
    if block_size not in BLOCK_SIZES:
        return f"option.block_size={block_size} is none of {BLOCK_SIZES}"
    for shape in shapes:
        if shape.key_dim != shape.value_dim or shape.key_dim not in HEAD_DIMS:
            return f"head dims {shape.key_dim} and {shape.value_dim} are not one of {HEAD_DIMS}"
    return None
