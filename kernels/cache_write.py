"""Writes new K and V into their slots of the paged cache."""

from __future__ import annotations

from torch import Tensor


def write_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Token t's K and V go to slot `slot_mapping[t]`.

    key, value: [T, kv_heads, head_dim]; caches: [blocks, block_size, kv_heads, head_dim], changed
    in place; slot_mapping: [T] int64, no slot twice.
    """
    key_cache.view(-1, *key.shape[1:]).index_copy_(0, slot_mapping, key)
    value_cache.view(-1, *value.shape[1:]).index_copy_(0, slot_mapping, value)
