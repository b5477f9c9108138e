"""Decode over fp8 caches with 4 warps, with 8 as before, and over caches of the query's type."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from unittest.mock import patch

import torch

from benchmarks.bench import Bench
from benchmarks.decode import decode_calls
from benchmarks.inputs import DRY_SHAPES, SHAPES, Lengths, Shape, make_inputs
from kernels.configurations import attention_configuration


def run(bench: Bench) -> None:
    for batch, context in [(2, 24)] if bench.is_dry else [(64, 4096), (16, 4096), (64, 1024)]:
        for shape in DRY_SHAPES[1:] if bench.is_dry else reversed(SHAPES):
            case = f"{shape} batch {batch} context {context}"
            if bench.is_over(f"{case} and the remaining cases"):
                return
            bench.attempt(case, partial(_measure, bench, shape, batch, context))


def _measure(bench: Bench, shape: Shape, batch: int, context: int) -> None:
    lengths = Lengths((1,) * batch, (context,) * batch)
    fp8 = torch.uint8 if bench.is_dry else torch.float8_e4m3fn
    before = replace(
        attention_configuration(
            "decode", shape.head_dim, shape.heads // shape.kv_heads, bench.dtype, fp8
        ),
        num_warps=8,
    )
    us = {"fp8": _time(bench, shape, lengths, fp8)}
    with patch("kernels.paged_decode.attention_configuration", lambda *_: before):
        us["8 warps"] = _time(bench, shape, lengths, fp8)
    us["unquantized"] = _time(bench, shape, lengths, bench.dtype)
    bench.row(
        shape=str(shape),
        batch=batch,
        context=context,
        bytes=lengths.kv_bytes(shape, fp8.itemsize),
        us=us,
    )


def _time(bench: Bench, shape: Shape, lengths: Lengths, cache_dtype: torch.dtype) -> float | None:
    inputs = make_inputs(
        shape,
        lengths,
        device=bench.device,
        dtype=bench.dtype,
        cache_dtype=cache_dtype,
        num_sets=bench.num_sets(lengths.kv_bytes(shape, cache_dtype.itemsize)),
    )
    return bench.time_us(decode_calls(bench, inputs, shape))
