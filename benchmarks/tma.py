"""Prefill over blocks of 64 tokens that TMA loads, against loads by all threads."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.bench import Bench
from benchmarks.inputs import DRY_SHAPES, Lengths, Shape, make_inputs
from benchmarks.prefill import prefill_calls, prompts

SHAPES = (Shape(32, 8, 128), Shape(32, 8, 64))
CASES = (("8 x 8192", prompts(8, 8192)), ("4 x 16384", prompts(4, 16384)))
DRY_CASES = (("5 over 100 cached", Lengths((5, 1), (105, 7))),)


def run(bench: Bench) -> None:
    if not bench.is_dry and torch.cuda.get_device_capability() < (9, 0):
        bench.note("left out: TMA needs sm_90")
        return
    for name, lengths in DRY_CASES if bench.is_dry else CASES:
        for shape in DRY_SHAPES[1:] if bench.is_dry else SHAPES:
            case = f"{shape} {name}"
            if bench.has_no_time_for(f"{case} and the remaining cases"):
                return
            bench.attempt(case, partial(_measure, bench, shape, name, lengths))


def _measure(bench: Bench, shape: Shape, name: str, lengths: Lengths) -> None:
    num_sets = bench.num_sets(lengths.kv_bytes(shape, bench.dtype.itemsize), max_sets=4)
    us = {}
    for loads, block_size in (("tma", 64), ("threads", 64), ("threads", 16)):
        inputs = make_inputs(
            shape, lengths, device=bench.device, dtype=bench.dtype, block_size=block_size,
            num_sets=num_sets,
        )  # fmt: skip
        us[f"{loads} {block_size}"] = bench.time_us(prefill_calls(inputs, by_tma=loads == "tma"))
    bench.row(shape=str(shape), tokens=name, flop=lengths.flop(shape), us=us)
