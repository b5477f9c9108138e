"""Sequences in shuffled blocks of a paged cache, with poison where no kernel may read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.arguments import EXPANDED_DIMS

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}
"""Maximum error relative to the largest number of the result, by the query's dtype."""


@dataclass(frozen=True)
class Paged:
    """The arguments of the attention wrappers, in order. paged_decode takes no query_starts."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    query_starts: Tensor
    context_lens: Tensor

    def blank_output(self) -> Tensor:
        """Return NaN in the shape of the attention's result."""
        shape = (*self.query.shape[:2], self.value_cache.shape[3])
        return self.query.new_full(shape, float("nan"))

    @property
    def decode_arguments(self) -> tuple[Tensor, ...]:
        return self.query, self.key_cache, self.value_cache, self.block_tables, self.context_lens

    @property
    def prefill_arguments(self) -> tuple[Tensor, ...]:
        return *self.decode_arguments[:-1], self.query_starts, self.context_lens


def make_paged(
    lengths: list[tuple[int, int]],
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    block_size: int = 16,
    layout: str = "NHD",
    ids: torch.dtype = torch.int32,
    spread: float = 1.0,
) -> Paged:
    """Make inputs.

    lengths: for each sequence, the number of its query tokens and the length of its context, which
    includes them. value_dim: V is the first dims of K's rows (a latent); None: V is of its own,
    with as many dims. If the dims are of EXPANDED_DIMS, it lies behind K in the same row.
    layout: "NHD", "HND", or "pair": each cache is a view of one half of
    blocks twice as large, as if these held K and V.

    All slots past a context and all blocks that no sequence has are poisoned: they hold NaN (in
    uint8, the code of NaN, which the kernels take for 480). Past a sequence's end, its block table
    names such a block.
    """
    generator = torch.Generator().manual_seed(hash((heads, head_dim, block_size)) % 2**31)
    num_heads, num_kv_heads = heads
    cache_dtype = cache_dtype or dtype
    counts = [-(-context // block_size) for _, context in lengths]
    order = torch.randperm(sum(counts) + 2, generator=generator)
    poisoned, order = order[0], order[2:]
    tables = torch.full((len(lengths), max(counts) + 1), int(poisoned), dtype=ids)
    slots = []
    for row, (blocks, (_, context)) in enumerate(zip(order.split(counts), lengths, strict=True)):
        tables[row, : len(blocks)] = blocks
        slots.append((blocks[:, None] * block_size + torch.arange(block_size)).flatten()[:context])
    shape = (len(order) + 2, block_size, num_kv_heads, head_dim)
    keys, values = (
        _in_layout(_poisoned_but(torch.cat(slots), shape, spread, generator), cache_dtype, layout)
        for _ in range(2)
    )
    if (head_dim, value_dim) in EXPANDED_DIMS:
        keys, values = torch.cat([keys, values[..., :value_dim]], -1).tensor_split([head_dim], -1)
    elif value_dim is not None:
        values = keys[..., :value_dim]
    starts = torch.tensor([0, *(new for new, _ in lengths)]).cumsum(0).int()
    query = torch.randn(int(starts[-1]), num_heads, head_dim, generator=generator) * spread
    contexts = torch.tensor([context for _, context in lengths], dtype=torch.int32)
    return Paged(query.to(dtype), keys, values, tables, starts, contexts)


def check_close(got: Tensor, expected: Tensor) -> None:
    assert got.isfinite().all()
    error = (got.double() - expected).abs().max()
    assert error <= TOLERANCE[got.dtype] * expected.abs().max().clamp(min=1e-3), error


def _poisoned_but(
    slots: Tensor, shape: tuple[int, ...], spread: float, generator: torch.Generator
) -> Tensor:
    cache = torch.full(shape, float("nan"))
    numbers = torch.randn(len(slots), *shape[2:], generator=generator) * spread
    cache.flatten(0, 1)[slots] = numbers
    return cache


def _in_layout(cache: Tensor, dtype: torch.dtype, layout: str) -> Tensor:
    """Return a cache in layout NHD, HND or "pair".

    In "pair", each block holds a block of the cache twice, and the result is a view of the first.
    """
    if dtype == torch.uint8:
        cache = cache.to(torch.float8_e4m3fn).view(torch.uint8)
    cache = cache.to(dtype)
    if layout == "HND":
        return cache.transpose(1, 2).contiguous().transpose(1, 2)
    return torch.stack([cache, cache], 1)[:, 0] if layout == "pair" else cache
