"""Prefill over blocks of 64 tokens that TMA loads, against loads by all threads."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import torch

from benchmarks.bench import Bench
from benchmarks.inputs import DRY_SHAPES, Lengths, Shape, make_inputs
from benchmarks.occupancy import using
from benchmarks.prefill import prefill_calls, prompts
from kernels.configurations import attention_configuration

SHAPES = (Shape(32, 8, 128), Shape(32, 8, 64))
CASES = (("16 x 4096", prompts(16, 4096)), ("4 x 16384", prompts(4, 16384)))
DRY_CASES = (("5 over 100 cached", Lengths((5, 1), (105, 7))),)
MOST_REGISTERS = 128
"""Of a thread, by TMA and with heads of 64, so that two programs fit on a multiprocessor. The
compiler would take more."""


def run(bench: Bench) -> None:
    if not bench.is_dry and torch.cuda.get_device_capability() < (9, 0):
        bench.note("left out: TMA needs sm_90")
        return
    for name, lengths in DRY_CASES if bench.is_dry else CASES:
        for shape in DRY_SHAPES[1:] if bench.is_dry else SHAPES:
            case = f"{shape} {name}"
            if bench.is_over(f"{case} and the remaining cases"):
                return
            bench.attempt(case, partial(_measure, bench, shape, name, lengths))


def _measure(bench: Bench, shape: Shape, name: str, lengths: Lengths) -> None:
    num_sets = bench.num_sets(lengths.kv_bytes(shape, bench.dtype.itemsize), most=4)
    us = {}
    for loads, block_size in (("tma", 64), ("threads", 64), ("threads", 16)):
        inputs = make_inputs(
            shape, lengths, device=bench.device, dtype=bench.dtype, block_size=block_size,
            num_sets=num_sets,
        )  # fmt: skip
        by_tma = loads == "tma"
        with tma_tile(shape, bench.dtype) if by_tma else nullcontext():
            us[f"{loads} {block_size}"] = bench.time_us(prefill_calls(inputs, by_tma=by_tma))
    bench.row(shape=str(shape), tokens=name, flop=lengths.flop(shape), us=us)


def tma_tile(shape: Shape, dtype: torch.dtype) -> AbstractContextManager[None]:
    """Let prefill use the product's tile, with heads of 64 in at most MOST_REGISTERS."""
    group = shape.heads // shape.kv_heads
    tile = attention_configuration("prefill", shape.head_dim, group, dtype, dtype)
    if shape.head_dim == 64:
        tile = replace(tile, max_registers=MOST_REGISTERS)
    return using("prefill", tile)
