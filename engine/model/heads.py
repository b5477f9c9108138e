"""The weights of attention heads: rows of q, k and v, and the norms of queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.model.loader import Loader, Source
from engine.model.norms import Norm
from engine.model.spec import DecoderSpec, LayerSpec
from engine.shard import Heads


def qkv_sources(
    spec: DecoderSpec, layer: LayerSpec, name: str, heads: Heads, order: Tensor | None
) -> list[Source]:
    """Return the weights that the fused QKV projection is loaded from.

    heads: this process's heads. order: a permutation of the elements of each query and key head.
    """
    family, dim = spec.family, layer.head_dim
    names = [f"{name}.{projection}" for projection in family.qkv]
    counts = (spec.num_heads, layer.num_kv_heads, layer.num_kv_heads)
    parts = (heads.queries, heads.keys, heads.keys)
    if family.qkv_by_head:
        rows = torch.arange(3 * counts[0] * dim).view(counts[0], 3, dim).transpose(0, 1)
        rows = rows[:, heads.queries.start : heads.queries.stop]
        return [Source(names[0], 3 * counts[0] * dim, rows.flatten())]
    is_whole = len(heads.queries) == spec.num_heads
    if family.gates_attention:
        by_head = torch.arange(2 * counts[0] * dim).view(counts[0], 2, dim)
        by_head = by_head[heads.queries.start : heads.queries.stop]
        rows = by_head.flip(1).transpose(0, 1).flatten()  # all gates, then all queries
        own_keys = None if is_whole else _rows(heads.keys, dim)
        keys = [Source(name, counts[1] * dim, own_keys) for name in names[1:]]
        return [Source(names[0], 2 * counts[0] * dim, rows), *keys]
    if len(names) == 1:
        starts = (0, counts[0], counts[0] + counts[1])
        rows = [_rows(part, dim, start) for part, start in zip(parts, starts, strict=True)]
        return [Source(names[0], sum(counts) * dim, None if is_whole else torch.cat(rows))]
    orders = (order, order, None)
    return [
        Source(
            name,
            count * dim,
            None if is_whole and part_order is None else _rows(part, dim, order=part_order),
        )
        for name, count, part, part_order in zip(names, counts, parts, orders, strict=True)
    ]


def _rows(heads: range, dim: int, start: int = 0, order: Tensor | None = None) -> Tensor:
    """Return the rows of these heads, [heads * dim] int64.

    start: how many heads of other kinds precede them in a merged tensor. order: the order of the
    elements within a head.
    """
    elements = torch.arange(dim) if order is None else order
    firsts = (torch.arange(heads.start, heads.stop) + start) * dim
    return (firsts[:, None] + elements).flatten()


def elements_of(heads: range, dim: int) -> range:
    return range(heads.start * dim, heads.stop * dim)


def halves_of_pairs(dim: int, rotary_dim: int) -> Tensor:
    """Return the permutation [dim] int64 from interleaved to half-split rotary layout.

    It moves elements 2i and 2i + 1, which rotate together, to i and i + rotary_dim / 2. Applied to
    queries and keys alike, it leaves their dot products unchanged.
    """
    rotated = torch.arange(rotary_dim).view(-1, 2).T.flatten()
    return torch.cat([rotated, torch.arange(rotary_dim, dim)])


def load_qk_norms(
    loader: Loader,
    spec: DecoderSpec,
    layer: LayerSpec,
    name: str,
    heads: Heads,
    order: Tensor | None,
) -> list[Norm]:
    """Load the norms of queries and of keys; return an empty list if the model has none.

    heads, order: as in `qkv_sources`.
    """
    family, dim, eps = spec.family, layer.head_dim, spec.norm_eps
    if not spec.qk_norm:
        return []
    norms: list[Norm] = []
    parts = (spec.num_heads, heads.queries, 1), (layer.num_kv_heads, heads.keys, heads.num_holders)
    for norm, (count, rank_heads, num_holders) in zip(family.qk_norm_names, parts, strict=True):
        full_name = f"{name}.{norm}"
        if spec.qk_norm == "row" and not loader.group.shard.is_whole:
            columns = elements_of(rank_heads, dim)
            norms.append(
                loader.split_norm(full_name, count * dim, columns, num_holders, family.norm, eps)
            )
        elif spec.qk_norm == "row":
            norms.append(loader.norm(full_name, (count * dim,), family.norm, eps, order))
        elif family.norm.subtracts_mean:
            norms.append(loader.norm(full_name, (count, dim), family.norm, eps, order, rank_heads))
        else:
            norms.append(loader.norm(full_name, (dim,), family.norm, eps, order))
    return norms
