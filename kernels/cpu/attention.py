"""Paged attention for all sequences of a step in one call."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels.attention.batch import PagedBatch
from kernels.cpu.calls import Kernel, run
from kernels.cpu.shared_library import SUFFIXES, WIDTH, function

MAX_DIM = 256


class Attention(ctypes.Structure):
    """Mirrors `struct Attention` in attention.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("out", "query", "keys", "values")),
        *((name, ctypes.c_void_p) for name in ("block_tables", "query_starts", "context_lens")),
        ("sinks", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_sequences", "num_decodes", "table_stride")),
        *((name, ctypes.c_int64) for name in ("block_size", "num_heads", "num_kv_heads")),
        *((name, ctypes.c_int64) for name in ("key_dim", "value_dim")),
        ("query_strides", ctypes.c_int64 * 2),
        ("key_strides", ctypes.c_int64 * 3),
        ("value_strides", ctypes.c_int64 * 3),
        ("window", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


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
    _check(query, key_cache, value_cache, batch)
    num_tokens, num_heads, key_dim = query.shape
    _, block_size, num_kv_heads, value_dim = value_cache.shape
    out = query.new_empty(num_tokens, num_heads, value_dim)
    sinks = None if sinks is None else sinks.float().contiguous()
    arguments = Attention(
        out=out.data_ptr(),
        query=query.data_ptr(),
        keys=key_cache.data_ptr(),
        values=value_cache.data_ptr(),
        block_tables=batch.block_tables.data_ptr(),
        query_starts=batch.query_starts.data_ptr(),
        context_lens=batch.context_lens.data_ptr(),
        sinks=None if sinks is None else sinks.data_ptr(),
        num_sequences=batch.context_lens.shape[0],
        num_decodes=batch.num_decodes,
        table_stride=batch.block_tables.stride(0),
        block_size=block_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        query_strides=query.stride()[:2],
        key_strides=key_cache.stride()[:3],
        value_strides=value_cache.stride()[:3],
        window=window or 0,
        scale=scale,
        softcap=softcap or 0.0,
    )
    run(Kernel(function("attend", query.dtype), arguments))
    return out


def _check(query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: PagedBatch) -> None:
    """Raise ValueError for inputs for which the C++ would read wrong addresses."""
    caches = (key_cache, value_cache)
    dims = (query.shape[2], value_cache.shape[3])
    if (
        key_cache.shape[:3] != value_cache.shape[:3]
        or key_cache.shape[3] != dims[0]
        or query.shape[1] % key_cache.shape[2]
        or any(dim % WIDTH or dim > MAX_DIM for dim in dims)
    ):
        raise ValueError(
            f"query {list(query.shape)}, keys {list(key_cache.shape)}, values "
            f"{list(value_cache.shape)}: shapes do not match, or head dims are not multiples of "
            f"{WIDTH} up to {MAX_DIM}"
        )
    if query.dtype not in SUFFIXES or any(cache.dtype != query.dtype for cache in caches):
        raise ValueError(
            f"queries of {query.dtype}, keys of {key_cache.dtype}, values of {value_cache.dtype}: "
            "all must be fp32, or all bf16"
        )
    if any(tensor.stride(-1) != 1 for tensor in (query, *caches)):
        raise ValueError("the last dim of queries, keys and values must be contiguous")
    check_ids(batch)


def check_ids(batch: PagedBatch) -> None:
    """Raise ValueError for index tensors that the C++ would misread."""
    for ids in (batch.block_tables, batch.query_starts, batch.context_lens):
        if ids.dtype != torch.int32 or ids.stride(-1) != 1:
            raise ValueError("block tables, query starts and context lengths must be dense int32")
