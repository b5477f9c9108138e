"""Paged attention for all sequences of a step in one call."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels.attention.batch import PagedBatch
from kernels.cpu.calls import SUFFIXES, Kernel, NoKernelError, function, run, token_stride
from kernels.cpu.shared_library import WIDTH

MAX_DIM = 576


class Attention(ctypes.Structure):
    """Mirrors `struct Attention` in attention.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("out", "query", "keys", "values")),
        *((name, ctypes.c_void_p) for name in ("block_tables", "query_starts", "context_lens")),
        ("sinks", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_sequences", "num_decodes", "table_stride")),
        *((name, ctypes.c_int64) for name in ("block_size", "num_heads", "num_kv_heads")),
        *((name, ctypes.c_int64) for name in ("key_dim", "value_dim", "out_stride")),
        ("query_strides", ctypes.c_int64 * 2),
        ("key_strides", ctypes.c_int64 * 3),
        ("value_strides", ctypes.c_int64 * 3),
        ("window", ctypes.c_int64),
        ("after", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )

    def set_batch(self, batch: PagedBatch) -> None:
        """Raises ValueError for index tensors that the C++ would misread."""
        for ids in (batch.block_tables, batch.query_starts, batch.context_lens):
            if ids.dtype != torch.int32 or ids.stride(-1) != 1:
                raise ValueError(
                    "block tables, query starts and context lengths must be dense int32"
                )
        self.block_tables = batch.block_tables.data_ptr()
        self.query_starts = batch.query_starts.data_ptr()
        self.context_lens = batch.context_lens.data_ptr()
        self.num_sequences = batch.context_lens.shape[0]
        self.num_decodes = batch.num_decodes
        self.table_stride = batch.block_tables.stride(0)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Same as `kernels.attention.sdpa.paged_attention`, with all sums in fp32.

    Queries and caches are all fp32 or all bf16, contiguous in their last dim. Head dims are
    multiples of WIDTH up to MAX_DIM; the index tensors of `batch` are int32. Raises ValueError for
    any other input.
    """
    out = query.new_empty(*query.shape[:2], value_cache.shape[3])
    kernel = attention(
        query, key_cache, value_cache, out,
        scale=scale, window=window, softcap=softcap, sinks=sinks,
    )  # fmt: skip
    kernel.arguments.set_batch(batch)
    run(kernel)
    return out


def attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    out: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    after: int = 0,
) -> Kernel[Attention]:
    """Return the kernel that computes `paged_attention` once its batch is set.

    out: [T, heads, value_dim]; tokens may lie apart. after: how many tokens behind its own each
    one also attends to, as far as there are so many. Raises NoKernelError for inputs that
    `paged_attention` does not take.
    """
    _check(query, key_cache, value_cache)
    _, block_size, num_kv_heads, value_dim = value_cache.shape
    sinks = None if sinks is None else sinks.float().contiguous()
    arguments = Attention(
        out=out.data_ptr(),
        query=query.data_ptr(),
        keys=key_cache.data_ptr(),
        values=value_cache.data_ptr(),
        sinks=None if sinks is None else sinks.data_ptr(),
        block_size=block_size,
        num_heads=query.shape[1],
        num_kv_heads=num_kv_heads,
        key_dim=query.shape[2],
        value_dim=value_dim,
        out_stride=token_stride(out),
        query_strides=query.stride()[:2],
        key_strides=key_cache.stride()[:3],
        value_strides=value_cache.stride()[:3],
        window=window or 0,
        after=after,
        scale=scale,
        softcap=softcap or 0.0,
    )
    kept = (query, key_cache, value_cache, out, sinks)
    return Kernel(function("attend", query.dtype), arguments, kept)


def _check(query: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
    """Raise NoKernelError for inputs for which the C++ would read wrong addresses."""
    caches = (key_cache, value_cache)
    dims = (query.shape[2], value_cache.shape[3])
    if (
        key_cache.shape[:3] != value_cache.shape[:3]
        or key_cache.shape[3] != dims[0]
        or query.shape[1] % key_cache.shape[2]
        or any(dim % WIDTH or dim > MAX_DIM for dim in dims)
    ):
        raise NoKernelError(
            f"query {list(query.shape)}, keys {list(key_cache.shape)}, values "
            f"{list(value_cache.shape)}: shapes do not match, or head dims are not multiples of "
            f"{WIDTH} up to {MAX_DIM}"
        )
    if query.dtype not in SUFFIXES or any(cache.dtype != query.dtype for cache in caches):
        raise NoKernelError(
            f"queries of {query.dtype}, keys of {key_cache.dtype}, values of {value_cache.dtype}: "
            "all must be fp32, or all bf16"
        )
    if any(tensor.stride(-1) != 1 for tensor in (query, *caches)):
        raise NoKernelError("the last dim of queries, keys and values must be contiguous")
