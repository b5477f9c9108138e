"""Decode over fp8 caches, and over 16-bit caches."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.inputs import DRY_SHAPES, SHAPES, Lengths, Shape, make_inputs
from benchmarks.gpu.kernels.decode import decode_calls


def run(bench: Bench) -> None:
    for batch, context in [(2, 24)] if bench.is_dry else [(64, 4096), (16, 4096), (64, 1024)]:
        for shape in DRY_SHAPES[1:] if bench.is_dry else reversed(SHAPES):
            case = f"{shape} batch {batch} context {context}"
            if bench.has_no_time_for(f"{case} and the remaining cases"):
                return
            bench.attempt(case, partial(_measure, bench, shape, batch, context))


def _measure(bench: Bench, shape: Shape, batch: int, context: int) -> None:
    lengths = Lengths((1,) * batch, (context,) * batch)
    fp8 = torch.uint8 if bench.is_dry else torch.float8_e4m3fn
    us = {
        name: _time(bench, shape, lengths, dtype)
        for name, dtype in (("fp8", fp8), ("unquantized", bench.dtype))
    }
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
