"""Paged attention on torch's scaled_dot_product_attention, for any device and head size.

Each sequence's blocks are gathered into a scratch buffer. Then one SDPA runs over exactly the
sequence's tokens, without padding. The buffer is reused, because the page faults of a new buffer
would cost more than the attention itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention.batch import PagedBatch


class Scratch:
    """Buffers for the gathered K and V of one sequence.

    They are as large as the longest sequence so far has needed.
    """

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

    query: [T, heads, head_dim]. Caches: [blocks, block_size, kv_heads, head_dim] of the query's
    type or fp8 e4m3 (float8_e4m3fn, or its bytes). They already contain the K and V of these
    tokens.
    window: the number of newest positions that a query sees, including its own. softcap: scores
    become softcap * tanh(score / softcap). sinks: [heads], an extra logit per head that joins the
    softmax but has no value. Returns [T, heads, value_dim].
    """
    out = query.new_empty(*query.shape[:2], value_cache.shape[3])
    scores = _Scores(scale, window, softcap, sinks)
    for row, (start, end, context_len) in enumerate(batch.host_spans()):
        if context_len == 0:
            out[start:end] = 0
            continue
        first_key = scores.first_key(end - start, context_len)
        caches = _Caches(key_cache, value_cache, batch.block_tables[row])
        keys, values = caches.gather(scratch, query.dtype, first_key, context_len)
        out[start:end] = _attend(query[start:end], keys, values, scores, sees_ahead=False)
    return out


def attend_in_images(
    out: Tensor,
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
) -> None:
    """Compute the rows of `batch.images` in `out` [T, heads, value_dim] again, without causality.

    Each of these tokens sees all tokens of its sequence up to the end of its image, except those
    that are `window` or more positions before it. The other arguments are those of
    `paged_attention`.
    """
    scores = _Scores(scale, window, softcap, sinks)
    for row, start, end, context_len in batch.images:
        first_key = scores.first_key(end - start, context_len)
        caches = _Caches(key_cache, value_cache, batch.block_tables[row])
        keys, values = caches.gather(scratch, query.dtype, first_key, context_len)
        out[start:end] = _attend(query[start:end], keys, values, scores, sees_ahead=True)


@dataclass(frozen=True, slots=True)
class _Scores:
    """How scores become weights; see `paged_attention`."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None

    def first_key(self, num_queries: int, context_len: int) -> int:
        """Return the first position that any of the last `num_queries` tokens sees."""
        return 0 if self.window is None else max(0, context_len - num_queries - self.window + 1)


@dataclass(frozen=True, slots=True)
class _Caches:
    """The K and V of one sequence in the cache."""

    keys: Tensor
    values: Tensor
    block_table: Tensor

    def gather(
        self, scratch: Scratch, dtype: torch.dtype, first_key: int, context_len: int
    ) -> tuple[Tensor, Tensor]:
        """Return K and V, [kv_heads, tokens, dim], from the block of `first_key` on."""
        block_size = self.keys.shape[1]
        first_block = first_key // block_size
        blocks = self.block_table[first_block : -(-context_len // block_size)]
        num_keys = context_len - first_block * block_size
        keys = scratch.gather("key", self.keys, blocks, dtype)[:num_keys]
        values = scratch.gather("value", self.values, blocks, dtype)[:num_keys]
        return keys.transpose(0, 1), values.transpose(0, 1)


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, scores: _Scores, *, sees_ahead: bool
) -> Tensor:
    """Return [Q, heads, value_dim] for the last Q tokens.

    sees_ahead: these tokens also see the later tokens among them.
    """
    queries = query.transpose(0, 1)
    is_plain = scores.softcap is None and scores.sinks is None
    attend = _sdpa if is_plain else _attend_by_hand
    return attend(queries, keys, values, scores, sees_ahead).transpose(0, 1)


def _sdpa(
    queries: Tensor, keys: Tensor, values: Tensor, scores: _Scores, sees_ahead: bool
) -> Tensor:
    """Return [heads, Q, value_dim] for queries [heads, Q, D], keys and values [kv_heads, K, D]."""
    (num_heads, num_queries, _), (num_kv_heads, num_keys, _) = queries.shape, keys.shape
    is_within_window = scores.window is None or num_keys <= scores.window
    if num_queries == 1 and is_within_window:
        # Decode: the heads of a group become queries of one KV head, so K and V are read once.
        grouped = queries.reshape(1, num_kv_heads, num_heads // num_kv_heads, -1)
        return F.scaled_dot_product_attention(
            grouped, keys[None], values[None], scale=scores.scale
        ).reshape(num_heads, 1, -1)
    is_whole_prompt = num_queries == num_keys and is_within_window and not sees_ahead
    needs_mask = not is_whole_prompt and not (sees_ahead and is_within_window)
    return F.scaled_dot_product_attention(
        queries[None],
        keys[None],
        values[None],
        attn_mask=_mask(queries, keys, scores.window, sees_ahead) if needs_mask else None,
        is_causal=is_whole_prompt,
        scale=scores.scale,
        enable_gqa=num_heads != num_kv_heads,
    )[0]


def _attend_by_hand(
    queries: Tensor, keys: Tensor, values: Tensor, scores: _Scores, sees_ahead: bool
) -> Tensor:
    """Attend with softcap or sinks, which SDPA does not support.

    The softmax is in fp32, as in transformers' eager attention.
    """
    num_heads, num_queries, _ = queries.shape
    mask = _mask(queries, keys, scores.window, sees_ahead)
    group = num_heads // keys.shape[0]
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    logits = queries @ keys.transpose(1, 2) * scores.scale
    if scores.softcap is not None:
        logits = scores.softcap * torch.tanh(logits / scores.softcap)
    logits = logits.float().masked_fill(~mask, float("-inf"))
    if scores.sinks is not None:
        column = scores.sinks.float().view(-1, 1, 1).expand(-1, num_queries, 1)
        logits = torch.cat([logits, column], -1)
    weights = logits.softmax(-1)[..., : keys.shape[1]]
    return weights.to(values.dtype) @ values


def _mask(queries: Tensor, keys: Tensor, window: int | None, sees_ahead: bool) -> Tensor:
    """Return a mask [Q, K], True where a query sees a key; the last query is at the last key."""
    num_queries, num_keys = queries.shape[1], keys.shape[1]
    query = torch.arange(num_keys - num_queries, num_keys, device=queries.device)[:, None]
    key = torch.arange(num_keys, device=queries.device)[None]
    mask = torch.ones_like(key <= query) if sees_ahead else key <= query
    return mask if window is None else mask & (key > query - window)


def _fits(buffer: Tensor, num_blocks: int, cache: Tensor) -> bool:
    return (
        buffer.dtype == cache.dtype
        and buffer.shape[0] >= num_blocks
        and buffer.shape[1:] == cache.shape[1:]
    )
