"""Decode over fp8 caches with today's tile of 4 warps and the former tile of 8 warps, and decode
over 16-bit caches."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.bench import Bench
from benchmarks.decode import decode_calls
from benchmarks.inputs import DRY_SHAPES, SHAPES, Lengths, PagedInputs, Shape, make_inputs
from benchmarks.occupancy import using, with_programs
from kernels.configurations import AttentionConfiguration

EARLIER = AttentionConfiguration(block_m=64, block_n=64, num_warps=8, num_stages=3)
"""The tile that fp8 caches had before today's tile of 4 warps."""


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
    us = _times_of_fp8(bench, shape, lengths, fp8)
    unquantized = _inputs(bench, shape, lengths, bench.dtype)
    us["unquantized"] = bench.time_us(decode_calls(bench, unquantized, shape))
    bench.row(
        shape=str(shape),
        batch=batch,
        context=context,
        bytes=lengths.kv_bytes(shape, fp8.itemsize),
        us=us,
    )


def _times_of_fp8(
    bench: Bench, shape: Shape, lengths: Lengths, fp8: torch.dtype
) -> dict[str, float | None]:
    """Time the tile of today and EARLIER, each with the number of splits that fills the GPU.

    Returns microseconds by tile.
    """
    inputs = _inputs(bench, shape, lengths, fp8)
    calls = decode_calls(bench, inputs, shape)
    earlier = EARLIER if bench.is_dry else with_programs("decode", EARLIER, calls[0])
    us = {"fp8": bench.time_us(calls)}
    with using("decode", earlier):
        us["8 warps"] = bench.time_us(decode_calls(bench, inputs, shape))
    return us


def _inputs(bench: Bench, shape: Shape, lengths: Lengths, cache_dtype: torch.dtype) -> PagedInputs:
    return make_inputs(
        shape,
        lengths,
        device=bench.device,
        dtype=bench.dtype,
        cache_dtype=cache_dtype,
        num_sets=bench.num_sets(lengths.kv_bytes(shape, cache_dtype.itemsize)),
    )
