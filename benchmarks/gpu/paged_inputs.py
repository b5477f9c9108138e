"""Random queries and paged KV caches, with each sequence's blocks scattered over the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kernels.attention.batch import PagedBatch
from kernels.attention.sdpa import Scratch, paged_attention


@dataclass(frozen=True, slots=True)
class Shape:
    heads: int
    kv_heads: int
    head_dim: int
    latent_dim: int | None = None
    """Dims of V if rows are latents, in which V is the first part of K; None if V is separate."""

    def __str__(self) -> str:
        dims = (self.heads, self.kv_heads, self.head_dim, self.latent_dim)
        return "/".join(str(dim) for dim in dims if dim is not None)

    @property
    def value_dim(self) -> int:
        return self.latent_dim or self.head_dim


SHAPES = (Shape(32, 32, 128), Shape(32, 8, 128))
DRY_SHAPES = (Shape(2, 2, 64), Shape(4, 1, 64))


TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-3, torch.bfloat16: 5e-3}
"""Limits of `relative_error`. fp8 caches are decoded exactly, so the same limits apply."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """New tokens and context length of each sequence of a batch."""

    queries: tuple[int, ...]
    contexts: tuple[int, ...]

    def kv_bytes(self, shape: Shape, itemsize: int) -> int:
        row_dim = shape.head_dim if shape.latent_dim else 2 * shape.head_dim
        return sum(self.contexts) * shape.kv_heads * row_dim * itemsize

    def query_bytes(self, shape: Shape, itemsize: int) -> int:
        """Return the bytes of queries and outputs."""
        return sum(self.queries) * shape.heads * (shape.head_dim + shape.value_dim) * itemsize

    def flop(self, shape: Shape) -> int:
        """Return the FLOPs of causal attention: QK and PV matmuls, two FLOPs per multiply-add."""
        lengths = zip(self.queries, self.contexts, strict=True)
        num_pairs = sum(new * (context - new) + new * (new + 1) // 2 for new, context in lengths)
        return 2 * shape.heads * (shape.head_dim + shape.value_dim) * num_pairs


@dataclass(frozen=True, slots=True)
class PagedInputs:
    """Inputs of an attention kernel, with several block tables to rotate among."""

    query: Tensor
    """[T, heads, head_dim]."""
    key_cache: Tensor
    """[blocks, block_size, kv_heads, head_dim]; the memory order depends on the layout."""
    value_cache: Tensor
    """Like key_cache; a view of its first dims if rows are latents."""
    tables: list[Tensor]
    """One block table [N, B] int32 per input set; the sets share no blocks."""
    query_starts: Tensor
    """[N + 1] int32."""
    context_lens: Tensor
    """[N] int32."""
    lengths: Lengths

    @property
    def scale(self) -> float:
        return self.query.shape[2] ** -0.5

    def new_out(self) -> Tensor:
        """Return an output [T, heads, dim of V], filled with NaN."""
        shape = (*self.query.shape[:2], self.value_cache.shape[3])
        return self.query.new_full(shape, float("nan"))

    def exact(self, *, key_scale: float = 1.0, value_scale: float = 1.0, **options: Any) -> Tensor:
        """Return the attention over the first table in fp64, by kernels.attention.sdpa, which tests
        check against the definition. options: window, softcap and sinks."""
        keys, values = _fp64(self.key_cache) * key_scale, _fp64(self.value_cache) * value_scale
        batch, query = self.batch(self.tables[0]), self.query.double()
        return paged_attention(query, keys, values, batch, Scratch(), scale=self.scale, **options)

    def batch(self, table: Tensor) -> PagedBatch:
        """Return the batch for kernels.attention.sdpa, with an empty slot mapping."""
        starts = [0, *accumulate(self.lengths.queries)]
        spans = zip(starts, starts[1:], self.lengths.contexts, strict=False)
        return PagedBatch(
            self.query_starts, self.context_lens, table.long(), table.new_empty(0), tuple(spans)
        )


def make_inputs(
    shape: Shape,
    lengths: Lengths,
    *,
    device: torch.device,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None = None,
    block_size: int = 16,
    layout: str = "NHD",
    num_sets: int = 1,
) -> PagedInputs:
    """Make random inputs whose caches hold `num_sets` batches with these lengths."""
    num_blocks = [-(-context // block_size) for context in lengths.contexts]
    pool = torch.randperm(num_sets * sum(num_blocks), dtype=torch.int32, device=device)
    tables = [
        _table(blocks.split(num_blocks), max(num_blocks)) for blocks in pool.split(sum(num_blocks))
    ]
    cache_shape = (len(pool), block_size, shape.kv_heads, shape.head_dim)
    keys = random_cache(cache_shape, cache_dtype or dtype, layout, device)
    if shape.latent_dim is None:
        values = random_cache(cache_shape, cache_dtype or dtype, layout, device)
    else:
        values = keys[..., : shape.latent_dim]
    return PagedInputs(
        query=torch.randn(
            sum(lengths.queries), shape.heads, shape.head_dim, dtype=dtype, device=device
        ),
        key_cache=keys,
        value_cache=values,
        tables=tables,
        query_starts=_int32([0, *accumulate(lengths.queries)], device),
        context_lens=_int32(lengths.contexts, device),
        lengths=lengths,
    )


def random_cache(
    shape: tuple[int, int, int, int], dtype: torch.dtype, layout: str, device: torch.device
) -> Tensor:
    """Return a cache [blocks, block_size, kv_heads, head_dim] of normally distributed numbers.

    Layout "HND" puts kv_heads before block_size in memory.
    """
    blocks, block_size, kv_heads, head_dim = shape
    inner = (kv_heads, block_size) if layout == "HND" else (block_size, kv_heads)
    cache = torch.empty(blocks, *inner, head_dim, dtype=dtype, device=device)
    if dtype.is_floating_point and dtype.itemsize > 1:
        cache.normal_()
    else:
        for part in cache.split(max(1, 2**26 // cache[0].numel())):
            numbers = torch.randn(part.shape, device=device).to(torch.float8_e4m3fn)
            part.view(torch.uint8).copy_(numbers.view(torch.uint8))
    return cache.transpose(1, 2) if layout == "HND" else cache


def ragged(num_sequences: int, longest: int) -> tuple[int, ...]:
    """Return lengths from a sixteenth of `longest` up to `longest`, in mixed order."""
    ranks = [7 * index % num_sequences for index in range(num_sequences)]
    num_steps = max(1, num_sequences - 1)
    return tuple(max(1, longest * (1 + 15 * rank // num_steps) // 16) for rank in ranks)


def relative_error(result: Tensor, exact: Tensor) -> float:
    """Return |result - exact| / |exact|; NaN if the result has one."""
    return float((result.double() - exact.double()).norm() / exact.double().norm())


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _fp64(cache: Tensor) -> Tensor:
    if cache.dtype == torch.uint8:
        cache = cache.view(torch.float8_e4m3fn)
    return (cache.float() if cache.dtype.itemsize == 1 else cache).double()


def _table(rows: Sequence[Tensor], width: int) -> Tensor:
    table = rows[0].new_zeros(len(rows), width)
    for row, blocks in enumerate(rows):
        table[row, : len(blocks)] = blocks
    return table


def _int32(numbers: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)
