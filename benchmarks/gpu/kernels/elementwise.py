"""Checks and times norms, gated activations and rotary embeddings against torch_elementwise."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.paged_inputs import DRY_SHAPES, SHAPES, Shape, random_cache
from kernels.cache import torch_cache
from kernels.cache.rotary_cache_write import rotary_write_kv
from kernels.elementwise import torch_elementwise
from kernels.elementwise.gated_activation import gated_activation
from kernels.elementwise.rms_norm import add_rms_norm, rms_norm
from kernels.elementwise.rotary import rotary

Norm = Callable[[Tensor, Tensor, float], Tensor]
EPS = 1e-6
MAX_SHARE_DIFFERENT = 0.02
"""Share of results that may round differently from torch's, which adds in another order."""
TWO_ROUNDINGS = 2**-6
"""A norm's result is rounded twice, before its weight and after."""


def run(bench: Bench) -> None:
    shape = DRY_SHAPES[1] if bench.is_dry else SHAPES[1]
    hidden, width = (64, 96) if bench.is_dry else (4096, 14336)
    for num_tokens in (3,) if bench.is_dry else (1, 50, 256, 8192):
        for operation, measure in (
            (f"norm of {hidden}", partial(_norm, bench, hidden)),
            (f"add and norm of {hidden}", partial(_add_norm, bench, hidden)),
            (f"norms of queries and keys of {shape}", partial(_head_norms, bench, shape)),
            (f"silu and product of {width}", partial(_activation, bench, width)),
            (f"rotary of {shape}", partial(_rotary, bench, shape)),
            (f"rotary and cache write of {shape}", partial(_rotary_write, bench, shape)),
        ):
            name = f"{operation}, {num_tokens} tokens"
            if bench.has_no_time_for(name):
                return
            bench.attempt(name, partial(measure, num_tokens, name))


def _norm(bench: Bench, hidden: int, num_tokens: int, name: str) -> None:
    weight = torch.rand(hidden, device=bench.device, dtype=bench.dtype)
    sets = _sets(bench, num_tokens, (hidden,))

    def call(norm: Norm, rows: Tensor) -> Tensor:
        return norm(rows, weight, EPS)

    _row(bench, name, 2 * sets[0].nbytes, sets, call, rms_norm, torch_elementwise.rms_norm)


def _head_norms(bench: Bench, shape: Shape, num_tokens: int, name: str) -> None:
    """Normalize each head of q and k inside the fused QKV projection's output."""
    heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim
    sets = _sets(bench, num_tokens, (heads + 2 * kv_heads, dim))
    weights = torch.rand(2, dim, device=bench.device, dtype=bench.dtype)
    weight_by_head = torch.cat([weights[:1].expand(heads, -1), weights[1:].expand(kv_heads, -1)])

    def call(norm: Norm, rows: Tensor) -> Tensor:
        return norm(rows[:, : heads + kv_heads], weight_by_head, EPS)

    num_bytes = 2 * num_tokens * (heads + kv_heads) * dim * bench.dtype.itemsize
    _row(bench, name, num_bytes, sets, call, rms_norm, torch_elementwise.rms_norm)


def _add_norm(bench: Bench, hidden: int, num_tokens: int, name: str) -> None:
    weight = torch.rand(hidden, device=bench.device, dtype=bench.dtype)
    sets = _sets(bench, num_tokens, (hidden,))
    output = torch.randn_like(sets[0])

    def call(norm: Callable[..., tuple[Tensor, Tensor]], rows: Tensor) -> Tensor:
        return norm(rows, output, weight, EPS)[1]

    _row(bench, name, 4 * sets[0].nbytes, sets, call, add_rms_norm, torch_elementwise.add_rms_norm)


def _activation(bench: Bench, width: int, num_tokens: int, name: str) -> None:
    sets = _sets(bench, num_tokens, (2 * width,))

    def call(activate: Callable[..., Tensor], rows: Tensor) -> Tensor:
        return activate(rows, activation="silu")

    num_bytes = sets[0].nbytes * 3 // 2
    reference = torch_elementwise.gated_activation
    _row(bench, name, num_bytes, sets, call, gated_activation, reference)


def _rotary(bench: Bench, shape: Shape, num_tokens: int, name: str) -> None:
    """Rotate q and k in place inside the fused QKV projection's output."""
    heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim
    cos, sin = _angles(bench, num_tokens, dim)
    sets = _sets(bench, num_tokens, (heads + 2 * kv_heads, dim))

    def call(rotate: Callable[..., object], rows: Tensor) -> Tensor:
        rotate(rows[:, :heads], rows[:, heads : heads + kv_heads], cos, sin, dim)
        return rows

    num_bytes = 2 * num_tokens * (heads + kv_heads) * dim * bench.dtype.itemsize
    _row(bench, name, num_bytes, sets, call, rotary, torch_elementwise.rotary)


def _rotary_write(bench: Bench, shape: Shape, num_tokens: int, name: str) -> None:
    """Rotate q in place, and write v and the rotated k into the cache."""
    heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim
    cos, sin = _angles(bench, num_tokens, dim)
    sets = _sets(bench, num_tokens, (heads + 2 * kv_heads, dim))
    pool = (-(-num_tokens // 16), 16, kv_heads, dim)
    keys, values = (random_cache(pool, bench.dtype, "NHD", bench.device) for _ in "kv")
    slots = torch.randperm(pool[0] * 16, device=bench.device)[:num_tokens]

    def apart(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> None:
        torch_elementwise.rotary(query, key, cos, sin, dim)
        torch_cache.write_kv(key, value, keys, values, slots)

    def call(write: Callable[..., None], rows: Tensor) -> Tensor:
        query, key, value = rows.split((heads, kv_heads, kv_heads), 1)
        write(query, key, value, cos, sin, dim, keys, values, slots)
        return query

    _row(bench, name, 2 * sets[0].nbytes, sets, call, rotary_write_kv, apart)


def _angles(bench: Bench, num_tokens: int, dim: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each [num_tokens, dim]."""
    angle = torch.rand(num_tokens, dim // 2, device=bench.device).repeat(1, 2) * 7
    return angle.cos().to(bench.dtype), angle.sin().to(bench.dtype)


def _sets(bench: Bench, num_tokens: int, inner: tuple[int, ...]) -> list[Tensor]:
    """Return random inputs of one size to rotate among, as many as `Bench.num_sets` says."""
    first = torch.randn(num_tokens, *inner, device=bench.device, dtype=bench.dtype)
    num_sets = bench.num_sets(first.nbytes, max_sets=64)
    return [first, *(torch.randn_like(first) for _ in range(num_sets - 1))]


def _row(
    bench: Bench,
    name: str,
    num_bytes: int,
    sets: list[Tensor],
    call: Callable[[Any, Tensor], Tensor],
    ours: Callable[..., object],
    reference: Callable[..., object],
) -> None:
    """Check and time two implementations. call: calls one of them with a set of inputs."""
    first, second, expected = (call(by, sets[0].clone()) for by in (ours, ours, reference))
    share_different = float((first != expected).float().mean())
    is_right = (
        torch.equal(first, second)
        and share_different <= MAX_SHARE_DIFFERENT
        and torch.allclose(first, expected, rtol=TWO_ROUNDINGS, atol=1e-4)
    )
    us = {
        peer: bench.time_us([partial(call, by, rows) for rows in sets])
        for peer, by in (("ours", ours), ("torch", reference))
    }
    bench.row(what=name, bytes=num_bytes, us=us, verdict="ok" if is_right else "WRONG")
