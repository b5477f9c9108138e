"""Tokens of several sequences and pools of slots, for the operations of layers with state."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kernels.state.batch import StateBatch

NUM_SLOTS = 24
HEADS = [(2, 2, 32, 64), (1, 3, 64, 32), (2, 4, 128, 128)]
"""Key heads, heads, dims of keys and of values."""


@dataclass(frozen=True)
class Chunk:
    """New tokens of a sequence."""

    length: int
    reads: int = -1
    writes: dict[int, int] = field(default_factory=dict)
    """Slots by the number of tokens after which they get the state."""


MIXED = [
    Chunk(1, 0, {1: 0}),
    Chunk(1, -1, {1: 1}),
    Chunk(1, 2, {1: 3}),
    Chunk(1),  # padding
    Chunk(40, -1, {20: 4, 40: 5}),
    Chunk(150, 6, {3: 7, 64: 8, 150: 6}),
    Chunk(17, 2, {17: 9}),  # reads what another sequence reads
    Chunk(64, 10, {64: 10}),
    Chunk(5, 11),
]
READ = [0, 2, 6, 10, 11]
WRITTEN = [0, 1, 3, 4, 5, 6, 7, 8, 9, 10]


def make_batch(chunks: Sequence[Chunk]) -> StateBatch:
    """chunks: those of one token first, if they are decodes."""
    lengths = [chunk.length for chunk in chunks]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    writes = torch.full((sum(lengths),), -1)
    for start, chunk in zip(starts.tolist(), chunks, strict=False):
        for offset, slot in chunk.writes.items():
            writes[start + offset - 1] = slot
    num_decodes = next((i for i, length in enumerate(lengths) if length > 1), len(lengths))
    reads = torch.tensor([chunk.reads for chunk in chunks])
    return StateBatch(starts.int(), reads, writes, None, num_decodes)


def make_tokens(
    num_tokens: int,
    heads: tuple[int, int, int, int],
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> dict[str, Any]:
    """Return `query` to `skip` of `state_step`. Queries, keys and values are slices of one
    tensor."""
    num_key_heads, num_heads, key_dim, value_dim = heads
    generator = torch.Generator().manual_seed(seed)
    widths = (num_key_heads * key_dim, num_key_heads * key_dim, num_heads * value_dim)
    query, key, value = (
        torch.randn(num_tokens, sum(widths), generator=generator).to(dtype).split(widths, 1)
    )
    gates = torch.rand(2, num_tokens, num_heads, generator=generator)
    return {
        "query": query.unflatten(1, (-1, key_dim)),
        "key": key.unflatten(1, (-1, key_dim)),
        "value": value.unflatten(1, (-1, value_dim)),
        "decay": -0.3 * gates[0],
        "rate": gates[1],
        "skip": torch.rand(num_heads, generator=generator),
    }


def make_scan(
    num_tokens: int, size: int, num_channels: int, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Return `query` to `skip` of `scan`. Queries to values are slices of tensors."""
    generator = torch.Generator().manual_seed(3)
    selected = torch.randn(num_tokens, 16 + 2 * size, generator=generator).to(dtype)
    values = torch.randn(num_tokens, 2 * num_channels, generator=generator).to(dtype)
    return {
        "query": selected[:, -size:],
        "key": selected[:, -2 * size : -size],
        "value": values[:, :num_channels],
        "rate": torch.rand(num_tokens, num_channels, generator=generator),
        "scale": -3 * torch.rand(size, num_channels, generator=generator),
        "skip": torch.rand(num_channels, generator=generator),
    }


def some_rows(tokens: dict[str, Any], rows: slice | Tensor) -> dict[str, Any]:
    whole = ("skip", "scale")
    return {name: part if name in whole else part[rows] for name, part in tokens.items()}


def make_pool(
    shape: Sequence[int], dtype: torch.dtype = torch.float32, known: Sequence[int] = READ
) -> Tensor:
    """Return slots of this shape, a part of larger ones. All but `known` are NaN."""
    size = int(torch.Size(shape).numel())
    rows = torch.full((NUM_SLOTS, size + 64), torch.nan, dtype=dtype)
    pool = rows[:, 32 : 32 + size].unflatten(1, tuple(shape))
    generator = torch.Generator().manual_seed(9)
    pool[list(known)] = torch.randn(len(known), *shape, generator=generator).to(dtype)
    return pool


OPERATIONS = ("convolution", "delta rule", "Mamba-2", "Mamba")
CUTS = (1, 1, 2, 3, 7, 19, 64, 65)
LENGTH = 150


def check_same_bits(
    operation: str,
    forms: Any,
    heads: tuple[int, int, int, int],
    dtype: torch.dtype = torch.float32,
) -> None:
    """Check that tokens of sequences that are cut at random, and computed together at random, get
    the bits of whole sequences that are computed alone.

    forms: a module with `conv_rows`, `state_step` and `scan`.
    """
    width = heads[1] * heads[3]
    tokens = make_tokens(3 * LENGTH, heads, dtype)
    rows = tokens["value"].flatten(1)
    weight = torch.randn(4, width, generator=torch.Generator().manual_seed(1)).to(dtype)
    is_convolution = operation == "convolution"
    shape = (3, width) if is_convolution else (heads[1], *heads[2:])
    if operation == "Mamba":
        tokens, shape = make_scan(3 * LENGTH, 24, width, dtype), (24, width)

    def run(parts: Sequence[tuple[int, int, int]], pool: Tensor) -> Tensor:
        """parts: the length, the sequence and the first token of chunks."""
        taken = torch.cat(
            [torch.arange(start, start + size) + s * LENGTH for size, s, start in parts]
        )
        batch = make_batch([Chunk(size, s if start else -1, {size: s}) for size, s, start in parts])
        if is_convolution:
            return forms.conv_rows(rows[taken], weight, None, pool, batch, silu=True)
        step = some_rows(tokens, taken)
        if operation == "Mamba":
            return forms.scan(**step, states=pool, batch=batch)
        is_delta = operation == "delta rule"
        return forms.state_step(**step, states=pool, batch=batch, is_delta=is_delta)

    def empty() -> Tensor:
        return make_pool(shape, dtype if is_convolution else torch.float32, known=())

    expected = [run([(LENGTH, s, 0)], empty()) for s in range(3)]
    rng, num_threads = random.Random(0), torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            done, pool = [0, 0, 0], empty()
            while min(done) < LENGTH:
                chosen = [s for s in rng.sample(range(3), rng.randint(1, 3)) if done[s] < LENGTH]
                parts = sorted(
                    (min(rng.choice(CUTS), LENGTH - done[s]), s, done[s]) for s in chosen
                )
                if not parts:
                    continue
                outs = run(parts, pool).split([size for size, _, _ in parts])
                for (size, s, start), out in zip(parts, outs, strict=True):
                    assert torch.equal(out, expected[s][start : start + size]), (s, start, size)
                    done[s] += size
    finally:
        torch.set_num_threads(num_threads)
