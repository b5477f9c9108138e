"""Prefill of few tokens after long prefixes: with the product's splits, without, with others."""

from __future__ import annotations

from functools import partial

from benchmarks.bench import Bench
from benchmarks.inputs import DRY_SHAPES, SHAPES, Lengths, Shape, make_inputs
from benchmarks.prefill import prefill_calls, splits_by_rule

CASES = (
    ("20 over 30000 cached", Lengths((20,), (30020,))),
    ("20 over 30000, prompt of 500", Lengths((20, 500), (30020, 500))),
    ("100 over 8192 cached", Lengths((100,), (8292,))),
    ("512 over 8192 cached", Lengths((512,), (8704,))),
    ("prompt of 4096", Lengths((4096,), (4096,))),
)
DRY_CASES = (("3 over 1100 cached", Lengths((3,), (1103,))),)


def run(bench: Bench) -> None:
    for name, lengths in DRY_CASES if bench.is_dry else CASES:
        for shape in DRY_SHAPES[1:] if bench.is_dry else reversed(SHAPES):
            case = f"{shape} {name}"
            if bench.is_over(f"{case} and the remaining cases"):
                return
            bench.attempt(case, partial(_measure, bench, shape, name, lengths))


def _measure(bench: Bench, shape: Shape, name: str, lengths: Lengths) -> None:
    num_sets = bench.num_sets(lengths.kv_bytes(shape, bench.dtype.itemsize), most=4)
    inputs = make_inputs(shape, lengths, device=bench.device, dtype=bench.dtype, num_sets=num_sets)
    rule = splits_by_rule(bench, inputs)
    counts = {"rule": rule, "unsplit": 1, "4": 4} | ({} if bench.is_dry else {"16": 16})
    us = {
        label: bench.time_us(prefill_calls(inputs, num_splits))
        for label, num_splits in counts.items()
    }
    bench.row(shape=str(shape), tokens=name, splits=rule, flop=lengths.flop(shape), us=us)
