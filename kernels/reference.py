"""Paged attention as its definition says, slowly, in fp64: what every kernel is tested against."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.batch import PagedBatch


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
) -> Tensor:
    """The signature and meaning of `kernels.sdpa.paged_attention`, one query and head at a time.

    Returns [T, heads, value_dim] in fp64.
    """
    num_tokens, num_heads, _ = query.shape
    group = num_heads // key_cache.shape[2]
    out = torch.zeros(num_tokens, num_heads, value_cache.shape[3], dtype=torch.float64)
    for row, (start, end, context_len) in enumerate(batch.spans):
        slots = [_slot(batch, row, position, key_cache.shape[1]) for position in range(context_len)]
        keys = key_cache.flatten(0, 1)[slots].double()
        values = value_cache.flatten(0, 1)[slots].double()
        for token in range(start, end):
            position = context_len - (end - token)
            first = 0 if window is None else max(0, position - window + 1)
            for head in range(num_heads):
                scores = keys[first : position + 1, head // group] @ query[token, head].double()
                scores = _softcap(scores * scale, softcap)
                weights = _softmax_with_sink(scores, None if sinks is None else sinks[head])
                out[token, head] = weights @ values[first : position + 1, head // group]
    return out


def _slot(batch: PagedBatch, row: int, position: int, block_size: int) -> int:
    block = int(batch.block_tables[row, position // block_size])
    return block * block_size + position % block_size


def _softcap(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def _softmax_with_sink(scores: Tensor, sink: Tensor | None) -> Tensor:
    """A sink takes a share of the probability and gives nothing for it."""
    if sink is None:
        return scores.softmax(-1)
    return torch.cat([scores, sink.double().view(1)]).softmax(-1)[:-1]
