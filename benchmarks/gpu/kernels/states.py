"""Checks layers with state against torch, and times them: a decode reads and writes its states."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench
from kernels.state import reference
from kernels.state.batch import StateBatch
from kernels.state.conv_rows import conv_rows
from kernels.state.state_tiles import state_tiles

HEADS = {
    "Qwen 3.5 4B": (16, 32, 128, 128, True),
    "Nemotron-H 8B": (8, 128, 128, 64, False),
}
"""Key heads, heads, dims of keys and of values; whether it is the delta rule."""
DRY_HEADS = {"tiny": (1, 2, 16, 32, True)}
TAPS = 4
TOLERANCE = 3e-2
"""Of bf16 results; the states are compared in fp32."""


def run(bench: Bench) -> None:
    batches = ((2, 1), (1, 5)) if bench.is_dry else ((1, 1), (16, 1), (64, 1), (256, 1), (4, 512))
    for model, heads in (DRY_HEADS if bench.is_dry else HEADS).items():
        for count, length in batches:
            name = f"{model}, {count} x {length} tokens"
            if bench.has_no_time_for(name):
                return
            bench.attempt(name, partial(_recurrence, bench, name, heads, count, length))
            channels = 2 * heads[0] * heads[2] + heads[1] * heads[3]
            bench.attempt(name, partial(_convolution, bench, name, channels, count, length))


def _recurrence(
    bench: Bench, name: str, heads: tuple[int, int, int, int, bool], count: int, length: int
) -> None:
    num_key_heads, num_heads, key_dim, value_dim, is_delta = heads
    size, options = count * length, {"dtype": bench.dtype, "device": bench.device}
    query, key = torch.randn(2, size, num_key_heads, key_dim, **options) / key_dim**0.5
    value = torch.randn(size, num_heads, value_dim, **options)
    decay, rate = torch.rand(2, size, num_heads, device=bench.device)
    tokens, shape = (query, key, value, -decay, rate), (num_heads, key_dim, value_dim)
    pool = torch.randn(count, *shape, device=bench.device)
    pools = [pool.clone() for _ in range(bench.num_sets(pool.nbytes, 8))]
    batch = _batch(bench, count, length)
    num_bytes = 2 * pool.nbytes + 2 * value.nbytes + 2 * query.nbytes
    both = pool.clone(), pool.clone()
    outs = [
        by(*tokens, states, batch, is_delta=is_delta)
        for by, states in zip((state_tiles, reference.state_step), both, strict=True)
    ]
    is_right = _is_close(*outs) and _is_close(*both)
    calls = [partial(state_tiles, *tokens, states, batch, is_delta=is_delta) for states in pools]
    us = {"ours": bench.time_us(calls)}
    _row(bench, f"recurrence of {name}", num_bytes, us, is_right)


def _convolution(bench: Bench, name: str, channels: int, count: int, length: int) -> None:
    options = {"dtype": bench.dtype, "device": bench.device}
    rows = torch.randn(count * length, channels, **options)
    weight = torch.randn(TAPS, channels, **options)
    tails = torch.randn(count, TAPS - 1, channels, **options)
    batch, both = _batch(bench, count, length), (tails.clone(), tails.clone())
    outs = [
        by(rows, weight, None, part, batch, silu=True)
        for by, part in zip((conv_rows, reference.conv_rows), both, strict=True)
    ]
    is_right = _is_close(*outs) and torch.equal(*both)
    us = {"ours": bench.time_us([partial(conv_rows, rows, weight, None, tails, batch, silu=True)])}
    _row(bench, f"convolution of {name}", 2 * (rows.nbytes + tails.nbytes), us, is_right)


def _batch(bench: Bench, count: int, length: int) -> StateBatch:
    ends = length * torch.arange(1, count + 1)
    slots, writes = torch.arange(count), torch.full((count * length,), -1)
    writes[ends - 1] = slots
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
    spans = tuple(zip(starts.tolist(), ends.tolist(), strict=False))
    starts, reads, writes = (part.to(bench.device) for part in (starts.int(), slots, writes))
    return StateBatch(starts, reads, writes, spans, count if length == 1 else 0)


def _is_close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one.float(), other.float(), rtol=TOLERANCE, atol=TOLERANCE)


def _row(bench: Bench, what: str, num_bytes: int, us: dict[str, Any], is_right: bool) -> None:
    bench.row(what=what, bytes=num_bytes, us=us, verdict="ok" if is_right else "WRONG")
