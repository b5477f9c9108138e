"""Decode with every number of splits, against the number chosen by kernels.configurations."""

from __future__ import annotations

from benchmarks.bench import Bench
from benchmarks.decode import decode_calls, splits_by_rule
from benchmarks.inputs import DRY_SHAPES, SHAPES, Lengths, make_inputs

ALL = (1, 2, 4, 8, 16, 32, 64)


def run(bench: Bench) -> None:
    shape = DRY_SHAPES[1] if bench.is_dry else SHAPES[1]
    for batch, length in (
        [(2, 24)] if bench.is_dry else [(1, 16384), (16, 4096), (64, 4096), (16, 16384)]
    ):
        if bench.is_over(f"batch {batch} context {length} and the remaining cases"):
            return
        lengths = Lengths((1,) * batch, (length,) * batch)
        num_sets = bench.num_sets(lengths.kv_bytes(shape, bench.dtype.itemsize))
        inputs = make_inputs(
            shape, lengths, device=bench.device, dtype=bench.dtype, num_sets=num_sets
        )
        rule = splits_by_rule(bench, inputs, shape)
        us = {"rule": bench.time_us(decode_calls(bench, inputs, shape, rule))}
        for splits in ALL[:2] if bench.is_dry else ALL:
            us[str(splits)] = bench.time_us(decode_calls(bench, inputs, shape, splits))
        bench.row(shape=str(shape), batch=batch, context=length, rule=rule, us=us)
