"""Paged attention on torch's scaled_dot_product_attention, for any device and head size.

Each sequence's blocks are gathered into a scratch buffer, then one SDPA runs over exactly its
tokens, without padding. The buffer is reused, because the page faults of a new one would cost more
than the attention itself.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.batch import PagedBatch


class Scratch:
    """Buffers for the gathered K and V of one sequence; they grow to the longest seen."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def gather(self, name: str, cache: Tensor, blocks: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the blocks of `cache` as [tokens, kv_heads, head_dim].

        The result is valid until the next call with this `name`. An fp8 e4m3 cache (float8_e4m3fn
        or its bytes) is converted to `dtype`.
        """
        is_fp8 = cache.dtype != dtype
        cache = cache.view(torch.uint8) if is_fp8 else cache
        # NOTE: len() of a tensor would cost more than the gather of a short sequence.
        num_blocks = blocks.shape[0]
        buffer = self._buffers.get(name)
        if buffer is None or not _fits(buffer, num_blocks, cache):
            buffer = self._buffers[name] = torch.empty(
                num_blocks, *cache.shape[1:], dtype=cache.dtype, device=cache.device
            )
        gathered = buffer[:num_blocks]
        torch.index_select(cache, 0, blocks, out=gathered)
        rows = gathered.flatten(0, 1)
        return rows.view(torch.float8_e4m3fn).to(dtype) if is_fp8 else rows


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    scratch: Scratch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the causal attention of new tokens over their sequence's K and V so far.

    query: [T, heads, head_dim]. Caches: [blocks, block_size, kv_heads, head_dim] of the same type
    or fp8 e4m3 (float8_e4m3fn, or its bytes), which already contain K and V of these tokens.
    window: the number of newest positions that a query sees, including its own. softcap: scores
    become softcap * tanh(score / softcap). sinks: [heads], an extra logit per head that joins the
    softmax but has no value. Returns [T, heads, value_dim].
    """
    out = query.new_empty(*query.shape[:2], value_cache.shape[3])
    block_size = key_cache.shape[1]
    for row, (start, end, context_len) in enumerate(batch.host_spans()):
        if context_len == 0:
            out[start:end] = 0
            continue
        first_query = context_len - (end - start)
        first_block = 0 if window is None else max(0, first_query - window + 1) // block_size
        blocks = batch.block_tables[row, first_block : -(-context_len // block_size)]
        num_keys = context_len - first_block * block_size
        keys = scratch.gather("key", key_cache, blocks, query.dtype)[:num_keys].transpose(0, 1)
        values = scratch.gather("value", value_cache, blocks, query.dtype)[:num_keys].transpose(
            0, 1
        )
        queries = query[start:end].transpose(0, 1)
        if softcap is None and sinks is None:
            attended = _sdpa(queries, keys, values, scale, window)
        else:
            attended = _attend_by_hand(queries, keys, values, scale, window, softcap, sinks)
        out[start:end] = attended.transpose(0, 1)
    return out


def _sdpa(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None
) -> Tensor:
    """Return [heads, Q, value_dim] for queries [heads, Q, D], keys and values [kv_heads, K, D]."""
    (num_heads, num_queries, _), (num_kv_heads, num_keys, _) = queries.shape, keys.shape
    if num_queries == 1 and (window is None or num_keys <= window):
        # Decode: the heads of a group become queries of one KV head, so K and V are read once.
        grouped = queries.reshape(1, num_kv_heads, num_heads // num_kv_heads, -1)
        return F.scaled_dot_product_attention(
            grouped, keys[None], values[None], scale=scale
        ).reshape(num_heads, 1, -1)
    is_whole_prompt = num_queries == num_keys and (window is None or num_keys <= window)
    mask = None if is_whole_prompt else _mask(num_queries, num_keys, window, queries.device)
    return F.scaled_dot_product_attention(
        queries[None],
        keys[None],
        values[None],
        attn_mask=mask,
        is_causal=is_whole_prompt,
        scale=scale,
        enable_gqa=num_heads != num_kv_heads,
    )[0]


def _attend_by_hand(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend with softcap or sinks, which SDPA does not support.

    The softmax is in fp32, as in transformers' eager attention.
    """
    num_heads, num_queries, _ = queries.shape
    group = num_heads // keys.shape[0]
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    scores = queries @ keys.transpose(1, 2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    mask = _mask(num_queries, keys.shape[1], window, queries.device)
    scores = scores.float().masked_fill(~mask, float("-inf"))
    if sinks is not None:
        column = sinks.float().view(-1, 1, 1).expand(-1, num_queries, 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., : keys.shape[1]]
    return weights.to(values.dtype) @ values


def _mask(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return a mask [Q, K], True where a query sees a key; the last query is at the last key."""
    query = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    key = torch.arange(num_keys, device=device)[None]
    mask = key <= query
    return mask if window is None else mask & (key > query - window)


def _fits(buffer: Tensor, num_blocks: int, cache: Tensor) -> bool:
    return (
        buffer.dtype == cache.dtype
        and buffer.shape[0] >= num_blocks
        and buffer.shape[1:] == cache.shape[1:]
    )
