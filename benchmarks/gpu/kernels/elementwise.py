"""Checks and times norms, gated activations and rotary embeddings.

Results are compared with kernels.elementwise.torch_elementwise, and times with the torch
operations that transformers' layers run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.inputs import DRY_SHAPES, SHAPES, Shape, random_cache
from kernels.cache import torch_cache
from kernels.cache.rotary_cache_write import rotary_write_kv
from kernels.elementwise import torch_elementwise
from kernels.elementwise.gated_activation import gated_activation
from kernels.elementwise.rms_norm import add_rms_norm, rms_norm
from kernels.elementwise.rotary import rotary

EPS = 1e-6
MAX_SHARE_DIFFERENT = 0.02
"""Share of results that may round differently from torch's, which adds in another order."""
ONE_ROUNDING = 2**-7


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
    _row(
        bench, name, 2 * sets[0].nbytes, sets,
        lambda rows: rms_norm(rows, weight, EPS),
        lambda rows: torch_elementwise.rms_norm(rows, weight, EPS),
        {
            "torch": lambda rows: _llama_norm(rows, weight),
            "F.rms_norm": lambda rows: F.rms_norm(rows, (hidden,), weight, EPS),
        },
    )  # fmt: skip


def _head_norms(bench: Bench, shape: Shape, num_tokens: int, name: str) -> None:
    """Normalize each head of q and k inside the fused QKV projection's output."""
    heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim
    sets = _sets(bench, num_tokens, (heads + 2 * kv_heads, dim))
    weights = torch.rand(2, dim, device=bench.device, dtype=bench.dtype)
    weight_by_head = torch.cat([weights[:1].expand(heads, -1), weights[1:].expand(kv_heads, -1)])

    def together(norm: Callable[..., Tensor], rows: Tensor) -> Tensor:
        return norm(rows[:, : heads + kv_heads], weight_by_head, EPS)

    def apart(norm: Callable[[Tensor, Tensor], Tensor], rows: Tensor) -> list[Tensor]:
        parts = rows.split((heads, kv_heads, kv_heads), 1)[:2]
        return [norm(part, weight) for part, weight in zip(parts, weights, strict=True)]

    def torch_norm(rows: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(rows, (dim,), weight, EPS)

    num_bytes = 2 * num_tokens * (heads + kv_heads) * dim * bench.dtype.itemsize
    _row(
        bench, name, num_bytes, sets,
        partial(together, rms_norm), partial(together, torch_elementwise.rms_norm),
        {
            "torch": partial(apart, _llama_norm),
            "F.rms_norm": partial(apart, torch_norm),
        },
    )  # fmt: skip


def _add_norm(bench: Bench, hidden: int, num_tokens: int, name: str) -> None:
    weight = torch.rand(hidden, device=bench.device, dtype=bench.dtype)
    sets = _sets(bench, num_tokens, (hidden,))
    output = torch.randn_like(sets[0])
    _row(
        bench, name, 4 * sets[0].nbytes, sets,
        lambda rows: add_rms_norm(rows, output, weight, EPS)[1],
        lambda rows: torch_elementwise.add_rms_norm(rows, output, weight, EPS)[1],
        {
            "torch": lambda rows: _llama_norm(rows + output, weight),
            "F.rms_norm": lambda rows: F.rms_norm(rows + output, (hidden,), weight, EPS),
        },
    )  # fmt: skip


def _llama_norm(rows: Tensor, weight: Tensor) -> Tensor:
    numbers = rows.to(torch.float32)
    mean_square = numbers.pow(2).mean(-1, keepdim=True)
    return weight * (numbers * torch.rsqrt(mean_square + EPS)).to(rows.dtype)


def _activation(bench: Bench, width: int, num_tokens: int, name: str) -> None:
    sets = _sets(bench, num_tokens, (2 * width,))
    reference = partial(torch_elementwise.gated_activation, activation="silu")
    ours = partial(gated_activation, activation="silu")
    _row(bench, name, sets[0].nbytes * 3 // 2, sets, ours, reference, {"torch": reference})


def _rotary(bench: Bench, shape: Shape, num_tokens: int, name: str) -> None:
    """Rotate q and k in place inside the fused QKV projection's output."""
    heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim
    cos, sin = _angles(bench, num_tokens, dim)
    sets = _sets(bench, num_tokens, (heads + 2 * kv_heads, dim))

    def rotated(rotate: Callable[..., Any], rows: Tensor) -> Tensor:
        rotate(rows[:, :heads], rows[:, heads : heads + kv_heads], cos, sin, dim)
        return rows

    def operations(rows: Tensor) -> list[Tensor]:
        parts = rows[:, :heads], rows[:, heads : heads + kv_heads]
        turned = [torch.cat((-x[..., dim // 2 :], x[..., : dim // 2]), -1) for x in parts]
        angles = cos[:, None], sin[:, None]
        return [x * angles[0] + y * angles[1] for x, y in zip(parts, turned, strict=True)]

    num_bytes = 2 * num_tokens * (heads + kv_heads) * dim * bench.dtype.itemsize
    reference = partial(rotated, torch_elementwise.rotary)
    _row(bench, name, num_bytes, sets, partial(rotated, rotary), reference, {"torch": operations})


def _rotary_write(bench: Bench, shape: Shape, num_tokens: int, name: str) -> None:
    """Rotate q in place, and write v and the rotated k into the cache."""
    heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim
    cos, sin = _angles(bench, num_tokens, dim)
    sets = _sets(bench, num_tokens, (heads + 2 * kv_heads, dim))
    pool = (-(-num_tokens // 16), 16, kv_heads, dim)
    keys, values = (random_cache(pool, bench.dtype, "NHD", bench.device) for _ in "kv")
    slots = torch.randperm(pool[0] * 16, device=bench.device)[:num_tokens]

    def fused(rows: Tensor) -> Tensor:
        query, key, value = rows.split((heads, kv_heads, kv_heads), 1)
        rotary_write_kv(query, key, value, cos, sin, dim, keys, values, slots)
        return query

    def operations(rows: Tensor) -> Tensor:
        query, key, value = rows.split((heads, kv_heads, kv_heads), 1)
        torch_elementwise.rotary(query, key, cos, sin, dim)
        torch_cache.write_kv(key, value, keys, values, slots)
        return query

    _row(bench, name, 2 * sets[0].nbytes, sets, fused, operations, {"torch": operations})


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
    ours: Callable[[Tensor], Any],
    reference: Callable[[Tensor], Any],
    peers: dict[str, Callable[[Tensor], Any]],
) -> None:
    first, second, expected = (call(sets[0].clone()) for call in (ours, ours, reference))
    share_different = float((first != expected).float().mean())
    is_right = (
        torch.equal(first, second)
        and share_different <= MAX_SHARE_DIFFERENT
        and torch.allclose(first, expected, rtol=ONE_ROUNDING, atol=1e-4)
    )
    us = {
        peer: bench.time_us([partial(call, rows) for rows in sets])
        for peer, call in ({"ours": ours} | peers).items()
    }
    bench.row(what=name, bytes=num_bytes, us=us, verdict="ok" if is_right else "WRONG")
