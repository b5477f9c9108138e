"""Checks layers with state against torch, and times them: a decode reads and writes its states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.paged_inputs import TOLERANCE, dtype_name, relative_error
from kernels.state import reference
from kernels.state.batch import StateBatch
from kernels.state.conv_rows import conv_rows
from kernels.state.scan import scan
from kernels.state.state_step import state_step
from kernels.state.state_tiles import state_tiles

Heads = tuple[int, int, int, int, bool]
"""Key heads, heads, dims of keys and of values; whether it is the delta rule."""
Tokens = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
Scanned = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
HEADS: dict[str, Heads] = {
    "Qwen 3.5 4B": (16, 32, 128, 128, True),
    "Nemotron-H 8B": (8, 128, 128, 64, False),
}
DRY_HEADS: dict[str, Heads] = {"tiny": (1, 2, 16, 32, True)}
SCAN, DRY_SCAN = (16, 5120), (16, 48)
"""Numbers of a channel's state, and channels, of Mamba 2.8B."""
TAPS = 4
STATE_TOLERANCE = 1e-3
"""Limit of the relative error of states in fp32. Products keep 16 bits of them."""


def run(bench: Bench) -> None:
    batches = ((2, 1), (1, 5)) if bench.is_dry else ((1, 1), (16, 1), (64, 1), (256, 1), (4, 512))
    for model, heads in _models(bench).items():
        for count, length in batches:
            name = f"{model}, {count} x {length} tokens"
            if bench.has_no_time_for(name):
                return
            bench.attempt(name, partial(_recurrence, bench, name, heads, count, length))
            channels = 2 * heads[0] * heads[2] + heads[1] * heads[3]
            bench.attempt(name, partial(_convolution, bench, name, channels, count, length))
    for count, length in batches:
        name = f"Mamba 2.8B, {count} x {length} tokens"
        if bench.has_no_time_for(name):
            return
        bench.attempt(name, partial(_scan, bench, name, count, length))


def check(bench: Bench) -> None:
    """Check batches of decodes and prompts in all types; see `_batch`."""
    for dtype in (bench.dtype, torch.float32) if bench.is_dry else TOLERANCE:
        # Tiles are for bf16.
        forms = (state_step, state_tiles) if dtype == bench.dtype else (state_step,)
        for model, heads in _models(bench).items():
            for form in forms:
                case = f"{form.__name__} {dtype_name(dtype)} {model}"
                bench.attempt(case, partial(_check_recurrence, bench, case, heads, dtype, form))
        case = f"scan {dtype_name(dtype)}"
        bench.attempt(case, partial(_check_scan, bench, case, dtype))
        for taps in (3, TAPS):
            case = f"conv_rows {dtype_name(dtype)} {taps} taps"
            bench.attempt(case, partial(_check_convolution, bench, case, dtype, taps))


def _check_recurrence(
    bench: Bench, case: str, heads: Heads, dtype: torch.dtype, form: Callable[..., Tensor]
) -> None:
    batch = _batch(bench, _mixed_lengths(bench), is_mixed=True)
    tokens, shape = _tokens(bench, heads, len(batch.writes), dtype)
    pool = _mixed_pool(batch, shape, {"device": bench.device})
    skip = torch.randn(heads[1], device=bench.device)
    options: dict[str, Any] = {"batch": batch, "is_delta": heads[4], "skip": skip}
    errors = _errors(
        lambda states: form(*tokens, states, **options),
        lambda states: reference.state_step(*tokens, states, **options),
        pool,
    )
    _check_row(bench, case, errors, (TOLERANCE[dtype], STATE_TOLERANCE))


def _check_scan(bench: Bench, case: str, dtype: torch.dtype) -> None:
    batch = _batch(bench, _mixed_lengths(bench), is_mixed=True)
    tokens = _scanned(bench, len(batch.writes), dtype)
    pool = _mixed_pool(batch, tokens[4].shape, {"device": bench.device})
    errors = _errors(
        lambda states: scan(*tokens, states, batch),
        lambda states: reference.scan(*tokens, states, batch),
        pool,
    )
    _check_row(bench, case, errors, (TOLERANCE[dtype], STATE_TOLERANCE))


def _check_convolution(bench: Bench, case: str, dtype: torch.dtype, taps: int) -> None:
    """Check four taps with a bias and silu, as in delta nets, or three with gates, as in LFM2."""
    options, channels = {"dtype": dtype, "device": bench.device}, 48 if bench.is_dry else 8192
    batch = _batch(bench, _mixed_lengths(bench), is_mixed=True)
    before, after, rows = torch.randn(len(batch.writes), 3 * channels, **options).chunk(3, 1)
    weight, bias = torch.randn(taps + 1, channels, **options).split([taps, 1])
    pool = _mixed_pool(batch, (taps - 1, channels), options)
    gates = {"before": before, "after": after}
    given: dict[str, Any] = {"silu": True} if taps == TAPS else gates
    inputs = (rows, weight, bias[0] if taps == TAPS else None)
    errors = _errors(
        lambda tails: conv_rows(*inputs, tails, batch, **given),
        lambda tails: reference.conv_rows(*inputs, tails, batch, **given),
        pool,
    )
    _check_row(bench, case, errors, (TOLERANCE[dtype], 0.0))


def _check_row(
    bench: Bench, case: str, errors: tuple[float, float], limits: tuple[float, float]
) -> None:
    verdict = _verdict(errors, limits)
    bench.row(case=case, out=errors[0], states=errors[1], verdict=verdict)


def _recurrence(bench: Bench, name: str, heads: Heads, count: int, length: int) -> None:
    tokens, shape = _tokens(bench, heads, count * length, bench.dtype)
    pool = torch.randn(count, *shape, device=bench.device)
    pools = [pool.clone() for _ in range(bench.num_sets(pool.nbytes, 8))]
    batch = _batch(bench, (length,) * count)
    options: dict[str, Any] = {"batch": batch, "is_delta": heads[4]}
    query, _, value, _, _ = tokens
    num_bytes = 2 * pool.nbytes + 2 * value.nbytes + 2 * query.nbytes
    errors = _errors(
        lambda states: state_tiles(*tokens, states, **options),
        lambda states: reference.state_step(*tokens, states, **options),
        pool,
    )
    calls = [partial(state_tiles, *tokens, states, **options) for states in pools]
    us, limits = {"ours": bench.time_us(calls)}, (TOLERANCE[bench.dtype], STATE_TOLERANCE)
    verdict = _verdict(errors, limits)
    bench.row(what=f"recurrence of {name}", bytes=num_bytes, us=us, verdict=verdict)


def _scan(bench: Bench, name: str, count: int, length: int) -> None:
    tokens = _scanned(bench, count * length, bench.dtype)
    query, _, value, rate, scale, _ = tokens
    pool = torch.randn(count, *scale.shape, device=bench.device)
    pools = [pool.clone() for _ in range(bench.num_sets(pool.nbytes, 8))]
    batch = _batch(bench, (length,) * count)
    errors = _errors(
        lambda states: scan(*tokens, states, batch),
        lambda states: reference.scan(*tokens, states, batch),
        pool,
    )
    us = {"ours": bench.time_us([partial(scan, *tokens, states, batch) for states in pools])}
    num_bytes = 2 * (pool.nbytes + value.nbytes + query.nbytes) + rate.nbytes + scale.nbytes
    verdict = _verdict(errors, (TOLERANCE[bench.dtype], STATE_TOLERANCE))
    bench.row(what=f"scan of {name}", bytes=num_bytes, us=us, verdict=verdict)


def _convolution(bench: Bench, name: str, channels: int, count: int, length: int) -> None:
    options = {"dtype": bench.dtype, "device": bench.device}
    rows = torch.randn(count * length, channels, **options)
    weight = torch.randn(TAPS, channels, **options)
    tails = torch.randn(count, TAPS - 1, channels, **options)
    batch = _batch(bench, (length,) * count)
    errors = _errors(
        lambda tails: conv_rows(rows, weight, None, tails, batch, silu=True),
        lambda tails: reference.conv_rows(rows, weight, None, tails, batch, silu=True),
        tails,
    )
    us = {"ours": bench.time_us([partial(conv_rows, rows, weight, None, tails, batch, silu=True)])}
    num_bytes, limits = 2 * (rows.nbytes + tails.nbytes), (TOLERANCE[bench.dtype], 0.0)
    verdict = _verdict(errors, limits)
    bench.row(what=f"convolution of {name}", bytes=num_bytes, us=us, verdict=verdict)


def _models(bench: Bench) -> dict[str, Heads]:
    return DRY_HEADS if bench.is_dry else HEADS


def _tokens(
    bench: Bench, heads: Heads, size: int, dtype: torch.dtype
) -> tuple[Tokens, tuple[int, int, int]]:
    """Return queries, keys, values, decays and rates of `size` tokens, and the shape of a state."""
    num_key_heads, num_heads, key_dim, value_dim, _ = heads
    options = {"dtype": dtype, "device": bench.device}
    query, key = torch.randn(2, size, num_key_heads, key_dim, **options) / key_dim**0.5
    value = torch.randn(size, num_heads, value_dim, **options)
    decay, rate = torch.rand(2, size, num_heads, device=bench.device)
    return (query, key, value, -decay, rate), (num_heads, key_dim, value_dim)


def _scanned(bench: Bench, count: int, dtype: torch.dtype) -> Scanned:
    """Return `query` to `skip` of `scan`, of `count` tokens."""
    size, num_channels = DRY_SCAN if bench.is_dry else SCAN
    options = {"dtype": dtype, "device": bench.device}
    query, key = torch.randn(2, count, size, **options) / size**0.5
    value = torch.randn(count, num_channels, **options)
    rate, scale, skip = (
        torch.rand(*shape, device=bench.device)
        for shape in ((count, num_channels), (size, num_channels), (num_channels,))
    )
    return query, key, value, rate, -scale, skip


def _mixed_lengths(bench: Bench) -> tuple[int, ...]:
    return (1, 1, 5, 3) if bench.is_dry else (1,) * 8 + (70, 513, 37)


def _mixed_pool(batch: StateBatch, shape: tuple[int, ...], options: dict[str, Any]) -> Tensor:
    """Return a pool for a mixed batch. The slots that it writes but does not read are NaN."""
    count = len(batch.reads)
    pool = torch.randn(count + 2, *shape, **options)
    pool[count - 1 :] = float("nan")
    return pool


def _batch(bench: Bench, lengths: Sequence[int], *, is_mixed: bool = False) -> StateBatch:
    """Return a batch of sequences that each read a slot and write it after their last token.

    is_mixed: the last sequence begins with zeros, the first leaves the slot that it read, and the
    second last also keeps its state after two tokens. There are two more slots.
    """
    count, starts = len(lengths), torch.tensor([0, *accumulate(lengths)])
    reads, writes = torch.arange(count), torch.full((sum(lengths),), -1)
    writes[starts[1:] - 1] = reads
    if is_mixed:
        reads[-1], writes[0], writes[starts[-3] + 1] = -1, count, count + 1
    spans = tuple(pairwise(starts.tolist()))
    starts, reads, writes = (part.to(bench.device) for part in (starts.int(), reads, writes))
    return StateBatch(starts, reads, writes, spans, lengths.count(1))


def _errors(
    ours: Callable[[Tensor], Tensor], exact: Callable[[Tensor], Tensor], pool: Tensor
) -> tuple[float, float]:
    """Return the errors of the outputs, and of the states that are in the pool afterwards."""
    states, right_states = pool.clone(), pool.clone()
    out, right = ours(states), exact(right_states)
    return relative_error(out, right), relative_error(states, right_states)


def _verdict(errors: tuple[float, float], limits: tuple[float, float]) -> str:
    is_right = all(error <= limit for error, limit in zip(errors, limits, strict=True))
    return "ok" if is_right else "WRONG"
