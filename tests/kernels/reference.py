"""A slow reference of paged attention in fp64, which all kernels are tested against."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.attention.batch import PagedBatch


def paged_attention_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Tensor:
    """Compute `kernels.attention.sdpa.paged_attention` for one query and head at a time.

    Caches may also hold fp8 e4m3 (float8_e4m3fn or bytes); the scales multiply their values.
    Returns [T, heads, value_dim] in fp64.
    """
    num_tokens, num_heads, _ = query.shape
    group = num_heads // key_cache.shape[2]
    out = torch.zeros(num_tokens, num_heads, value_cache.shape[3], dtype=torch.float64)
    for row, (start, end, context_len) in enumerate(batch.host_spans()):
        slots = [_slot(batch, row, position, key_cache.shape[1]) for position in range(context_len)]
        keys = _numbers(key_cache.flatten(0, 1)[slots]) * key_scale
        values = _numbers(value_cache.flatten(0, 1)[slots]) * value_scale
        for token in range(start, end):
            position = context_len - (end - token)
            first = 0 if window is None else max(0, position - window + 1)
            for head in range(num_heads):
                scores = keys[first : position + 1, head // group] @ query[token, head].double()
                scores = _softcap(scores * scale, softcap)
                weights = _softmax_with_sink(scores, None if sinks is None else sinks[head])
                out[token, head] = weights @ values[first : position + 1, head // group]
    return out


def paged_decode_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    **options: Any,
) -> Tensor:
    """Reference of `kernels.attention.paged_decode.paged_decode`, with the options that affect the
    result."""
    starts = torch.arange(len(context_lens) + 1)
    return paged_prefill_reference(
        query, key_cache, value_cache, block_tables, starts, context_lens, **options
    )


def paged_prefill_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    **options: Any,
) -> Tensor:
    """Reference of `kernels.attention.paged_prefill.paged_prefill`, with the options that affect
    the result.

    A sequence with a context of 0 is padding; its output is zero.
    """
    starts, lens = query_starts.tolist(), context_lens.tolist()
    spans = tuple(
        (starts[row], starts[row + 1] if lens[row] else starts[row], lens[row])
        for row in range(len(lens))
    )
    batch = PagedBatch(query_starts, context_lens, block_tables, context_lens[:0], spans)
    return paged_attention_reference(query, key_cache, value_cache, batch, **options)


def _numbers(cache: Tensor) -> Tensor:
    return (cache.view(torch.float8_e4m3fn) if cache.dtype == torch.uint8 else cache).double()


def _slot(batch: PagedBatch, row: int, position: int, block_size: int) -> int:
    block = int(batch.block_tables[row, position // block_size])
    return block * block_size + position % block_size


def _softcap(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def _softmax_with_sink(scores: Tensor, sink: Tensor | None) -> Tensor:
    """Compute a softmax in which a sink takes a share of the probability but has no value."""
    if sink is None:
        return scores.softmax(-1)
    return torch.cat([scores, sink.double().view(1)]).softmax(-1)[:-1]
