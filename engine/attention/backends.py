"""Attention backends, which write, read and move the KV cache: Triton, C++ on CPUs, or torch.

Triton's modules are imported only where they are used, so that CPUs do not need Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from core.configuration.kv_layout import LayerShape
from core.errors import ConfigurationError
from engine.attention.call import AttentionCall
from kernels.arguments import BLOCK_SIZES, HEAD_DIMS, LATENT_DIMS, has_kernel
from kernels.attention.batch import PagedBatch
from kernels.attention.sdpa import Scratch, paged_attention
from kernels.cache import torch_cache
from kernels.cache.cache_table import BlockKernels
from kernels.cpu import attention as cpu_attention
from kernels.cpu import cache as cpu_cache
from kernels.cpu import elementwise as cpu_elementwise
from kernels.cpu.attention import MAX_DIM
from kernels.cpu.calls import SUFFIXES
from kernels.cpu.shared_library import WIDTH, unavailable_reason
from kernels.elementwise import torch_elementwise


class AttentionBackend(Protocol):
    """Computes one layer's attention over its KV cache.

    keys, values: the layer's cache, [num_blocks, block_size, kv_heads, head_dim or value_dim]. If K
    and V share dims, `write` gets only those of V that are not K's.
    """

    block_kernels: BlockKernels

    def write(self, call: AttentionCall, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Write the new K and V of `call` into their slots [T]; a negative slot is padding.

        If the call has a rotation, also rotate its queries in place, and write rotated keys.
        Whether `call.key` itself is rotated depends on the backend.
        """
        ...

    def attend(
        self, call: AttentionCall, keys: Tensor, values: Tensor, batch: PagedBatch
    ) -> Tensor:
        """Return the attention output, [T, heads, value_dim]. Call `write` first."""
        ...

    def expanding(self, dims: tuple[int, int]) -> AttentionBackend | None:
        """Return a backend for K and V that latents were expanded to, whose caches share rows.

        dims: those of K and V of a head. None: latents stay as they are in every step. The backend
        is used beside this one in one step, with a batch of its own.
        """
        ...

    def scratch_bytes(self, call: AttentionCall, kv_dtype: torch.dtype, num_sequences: int) -> int:
        """Return the most bytes that `attend` allocates for such a call, besides its output.

        num_sequences: the most sequences that decode in a step. The contents of the call's tensors
        are not read.
        """
        ...


def make_backend(
    device: torch.device,
    shapes: Sequence[LayerShape],
    block_size: int,
    max_model_len: int,
    kv_dtype: torch.dtype,
    *,
    in_segments: bool = False,
) -> tuple[AttentionBackend, tuple[str, ...]]:
    """Return the fastest backend that supports these layers, and notes for the log.

    max_model_len: the longest context, in tokens. If torch's SDPA has to be used, a note says why.
    in_segments: on CUDA, return a backend that gives a token the same bits in any batch. Raises
    ConfigurationError if it does not support the layers.
    """
    if device.type != "cuda":
        reason = _unsupported_in_cpp(shapes, kv_dtype)
        if reason is None:
            return CpuBackend(), ()
        return sdpa_backend(device), (f"attention runs on torch's SDPA, slowly: {reason}",)
    reason = _unsupported_in_triton(shapes, block_size)
    if in_segments and any(shape.is_latent for shape in shapes):
        reason = "torch computes the products of latent attention"
    if reason is not None and in_segments:
        raise ConfigurationError(
            f"option.batch_invariant=true needs the Triton kernels: {reason}; leave the option out"
        )
    if reason is not None:
        return sdpa_backend(device), (f"attention runs on torch's SDPA, slowly: {reason}",)
    num_processors = torch.cuda.get_device_properties(device).multi_processor_count
    if in_segments:
        from engine.attention.segment_backend import SegmentBackend

        return SegmentBackend(num_processors, max_model_len), ()
    from engine.attention.triton_backend import TritonBackend

    return TritonBackend(num_processors, max_model_len), ()


def sdpa_backend(device: torch.device) -> TorchBackend:
    """Return torch's SDPA with the fastest rotary embedding for the device."""
    if device.type != "cuda":
        return TorchBackend(cpu_elementwise.rotary)
    # Imported only here, so that CPUs do not need Triton.
    from kernels.elementwise.rotary import rotary

    return TorchBackend(rotary)


class TorchBackend:
    """Runs torch's SDPA, which takes any shape on any device."""

    def __init__(self, rotary: Callable[..., None] = torch_elementwise.rotary) -> None:
        """rotary: rotates queries and keys in place."""
        self._rotary = rotary
        self._scratch = Scratch()
        self.block_kernels = BlockKernels(
            copy=torch_cache.copy_blocks,
            gather=torch_cache.gather_blocks,
            scatter=torch_cache.scatter_blocks,
        )

    def write(self, call: AttentionCall, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        if call.rotation is not None:
            self._rotary(call.query, call.key, *call.rotation)
        torch_cache.write_kv(call.key, call.value, keys, values, slots)

    def expanding(self, dims: tuple[int, int]) -> AttentionBackend | None:
        # On CPUs, a token has the same bits in a prompt as decoded, so there is one form.
        return None

    def scratch_bytes(self, call: AttentionCall, kv_dtype: torch.dtype, num_sequences: int) -> int:
        # `attend` gathers the K and V of one sequence at a time. They are not counted, because no
        # limit of a step bounds the length of a sequence.
        return 0

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
    """Runs the C++ kernels; torch copies and swaps blocks."""

    def __init__(self) -> None:
        super().__init__(cpu_elementwise.rotary)

    def write(self, call: AttentionCall, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        if call.rotation is not None:
            self._rotary(call.query, call.key, *call.rotation)
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


def _dense(rows: Tensor) -> Tensor:
    """Return rows [T, heads, dim] whose last dimension is contiguous, copied if need be."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _unsupported_in_cpp(shapes: Sequence[LayerShape], kv_dtype: torch.dtype) -> str | None:
    """Return why the C++ kernels cannot compute these layers, or None."""
    if kv_dtype not in SUFFIXES:
        return f"a KV cache of {str(kv_dtype).removeprefix('torch.')} is supported only on GPUs"
    for shape in shapes:
        for dim in shape.dims:
            if dim % WIDTH or dim > MAX_DIM:
                return f"a head dim of {dim} is not a multiple of {WIDTH} up to {MAX_DIM}"
    return unavailable_reason()


def _unsupported_in_triton(shapes: Sequence[LayerShape], block_size: int) -> str | None:
    """Return why the Triton kernels cannot compute these layers, or None."""
    if block_size not in BLOCK_SIZES:
        return f"option.block_size={block_size} is not one of {BLOCK_SIZES}"
    for shape in shapes:
        if shape.is_latent and shape.dims not in LATENT_DIMS:
            return f"rows of {shape.key_dim} are no latents of {LATENT_DIMS}"
        key_dim, value_dim = shape.dims
        if not has_kernel(key_dim, value_dim):
            return (
                f"head dims {key_dim} (keys) and {value_dim} (values) must be equal "
                f"and one of {HEAD_DIMS}"
            )
        if shape.shared_dim and shape.value_dim % 16:
            return f"{shape.value_dim} rotated dims of keys beside V are no multiple of 16"
    return None
