"""Attention that loads block ids one tile ahead, against the kernels before that.

A tile's ids are then in registers when its K and V are to be loaded, so that the pipeliner loads K
and V `num_stages` ahead.
"""

from __future__ import annotations

from functools import partial

import torch

from benchmarks import peers
from benchmarks.bench import Bench
from benchmarks.decode import decode_calls
from benchmarks.inputs import DRY_SHAPES, SHAPES, Lengths, PagedInputs, Shape, make_inputs
from benchmarks.predecessors import decode_without_ids_ahead, prefill_without_ids_ahead
from benchmarks.prefill import prefill_calls, prompts
from kernels.paged_decode import paged_decode
from kernels.paged_prefill import paged_prefill

ONE_ROUNDING = 2**-7


def run(bench: Bench) -> None:
    for name, shape, lengths in _dry_cases() if bench.is_dry else _cases():
        if bench.has_no_time_for(f"{name} and the remaining cases"):
            return
        bench.attempt(name, partial(_measure, bench, name, shape, lengths))


def _cases() -> list[tuple[str, Shape, Lengths]]:
    few = SHAPES[1]
    return [
        ("decode 64 at 4096", few, _decodes(64, 4096)),
        ("prefill 8 x 8192", few, prompts(8, 8192)),
        ("decode 64 at 4096", Shape(32, 8, 64), _decodes(64, 4096)),
        ("prefill 8 x 8192", Shape(32, 8, 64), prompts(8, 8192)),
    ]


def _dry_cases() -> list[tuple[str, Shape, Lengths]]:
    shape = DRY_SHAPES[1]
    return [
        ("decode 3 at 200", shape, _decodes(3, 200)),
        ("prefill 2 x 150", shape, prompts(2, 150)),
    ]


def _decodes(batch: int, context: int) -> Lengths:
    return Lengths((1,) * batch, (context,) * batch)


def calls_of_both(
    bench: Bench, inputs: PagedInputs, shape: Shape, *, is_decode: bool
) -> dict[str, peers.Calls]:
    """Return calls of the product's kernel, and of the same kernel with ids not loaded ahead."""
    if is_decode:
        calls = partial(decode_calls, bench, inputs, shape)
        attention = paged_decode, decode_without_ids_ahead().paged_decode
    else:
        calls = partial(prefill_calls, inputs)
        attention = paged_prefill, prefill_without_ids_ahead().paged_prefill
    ours, predecessor = (calls(attend=attend) for attend in attention)
    return {"ours": ours, "ids not ahead": predecessor}


def _measure(bench: Bench, name: str, shape: Shape, lengths: Lengths) -> None:
    inputs = make_inputs(
        shape,
        lengths,
        device=bench.device,
        dtype=bench.dtype,
        num_sets=bench.num_sets(lengths.kv_bytes(shape, bench.dtype.itemsize), max_sets=4),
    )
    both = calls_of_both(bench, inputs, shape, is_decode=name.startswith("decode"))
    results = [calls[0]() for calls in both.values()]
    is_equal = torch.allclose(*results, rtol=ONE_ROUNDING, atol=1e-4)
    us = {label: bench.time_us(calls) for label, calls in both.items()}
    bench.row(shape=str(shape), what=name, us=us, verdict="ok" if is_equal else "WRONG")
