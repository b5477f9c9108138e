"""Times option.batch_invariant's kernels beside the default ones, and compares bits.

Rows of a product are computed alone and among others; a token's attention as a decode, as a part of
its prompt, with splits and without.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.kernels.decode import decode_calls
from benchmarks.gpu.kernels.prefill import prefill_calls, work_by_rule
from benchmarks.gpu.paged_inputs import DRY_SHAPES, SHAPES, Lengths, PagedInputs, make_inputs
from kernels.attention.paged_prefill import paged_prefill, segment_work, wanted_segments
from kernels.attention.prefill_work import PrefillWork
from kernels.linear.pinned_linear import pinned_linear

NUM_OTHERS = 300
"""Rows that are computed beside those of a product."""


def run(bench: Bench) -> None:
    for outputs, inputs in [(48, 64)] if bench.is_dry else [(6144, 4096), (4096, 14336)]:
        for num_rows in (3,) if bench.is_dry else (1, 16, 256, 4096):
            name = f"product of {outputs} x {inputs}, {num_rows} rows"
            if bench.has_no_time_for(name):
                return
            bench.attempt(name, partial(_product, bench, outputs, inputs, num_rows, name))
    for name, lengths in (_dry_lengths() if bench.is_dry else _lengths()).items():
        if bench.has_no_time_for(name):
            return
        bench.attempt(name, partial(_attention, bench, lengths, name))


def _lengths() -> dict[str, Lengths]:
    return {
        "64 decodes at 4,096": Lengths((1,) * 64, (4096,) * 64),
        "1 decode at 32,768": Lengths((1,), (32768,)),
        "prompt of 2,048": Lengths((2048,), (2048,)),
        "512 tokens after 8,192": Lengths((512,), (8704,)),
    }


def _dry_lengths() -> dict[str, Lengths]:
    return {"2 decodes": Lengths((1, 1), (40, 17)), "a prompt": Lengths((20,), (20,))}


def _product(bench: Bench, outputs: int, inputs: int, num_rows: int, name: str) -> None:
    weight = torch.randn(outputs, inputs, device=bench.device, dtype=bench.dtype)
    among = torch.randn(num_rows + NUM_OTHERS, inputs, device=bench.device, dtype=bench.dtype)
    rows = among[:num_rows]
    weights = [weight.clone() for _ in range(bench.num_sets(weight.nbytes))]
    us = {
        "ours": bench.time_us([partial(pinned_linear, rows, copy, None) for copy in weights]),
        "default": bench.time_us([partial(F.linear, rows, copy) for copy in weights]),
    }
    alone = pinned_linear(rows, weight, None)
    is_same = torch.equal(alone, pinned_linear(among, weight, None)[:num_rows])
    flop = 2 * num_rows * outputs * inputs
    verdict = "ok" if is_same else "OTHER BITS"
    bench.row(what=name, bytes=weight.nbytes, flop=flop, us=us, verdict=verdict)


def _attention(bench: Bench, lengths: Lengths, name: str) -> None:
    shape = DRY_SHAPES[1] if bench.is_dry else SHAPES[1]
    num_bytes = lengths.kv_bytes(shape, bench.dtype.itemsize)
    inputs = make_inputs(
        shape,
        lengths,
        device=bench.device,
        dtype=bench.dtype,
        num_sets=bench.num_sets(num_bytes),
    )
    num_splits = wanted_segments(
        inputs.query, inputs.key_cache, max(lengths.contexts), bench.num_processors
    )
    work = _work(inputs, num_splits)
    is_decode = set(lengths.queries) == {1}
    default = (
        decode_calls(bench, inputs, shape)
        if is_decode
        else prefill_calls(inputs, work_by_rule(bench, inputs))
    )
    us = {
        "ours": bench.time_us([partial(_attend, inputs, table, work) for table in inputs.tables]),
        "default": bench.time_us(default),
    }
    table = inputs.tables[0]
    got = _attend(inputs, table, work)
    is_same = torch.equal(got, _attend(inputs, table, _work(inputs, 0))) and torch.equal(
        got[-1:], _last_token_alone(inputs, table)
    )
    flop, verdict = lengths.flop(shape), "ok" if is_same else "OTHER BITS"
    bench.row(what=name, bytes=num_bytes, flop=flop, us=us, verdict=verdict)


def _work(inputs: PagedInputs, num_splits: int) -> PrefillWork:
    lengths = (inputs.query_starts, inputs.context_lens)
    return segment_work(inputs.query, inputs.key_cache, *lengths, num_splits)


def _attend(inputs: PagedInputs, table: Tensor, work: PrefillWork) -> Tensor:
    caches = (inputs.key_cache, inputs.value_cache)
    lengths = (inputs.query_starts, inputs.context_lens)
    return paged_prefill(inputs.query, *caches, table, *lengths, scale=inputs.scale, work=work)


def _last_token_alone(inputs: PagedInputs, table: Tensor) -> Tensor:
    """Return the attention of the last sequence's last token, computed as a decode."""
    alone = replace(
        inputs,
        query=inputs.query[-1:],
        query_starts=inputs.query_starts[:2].clamp(max=1),
        context_lens=inputs.context_lens[-1:],
    )
    return _attend(alone, table[-1:], _work(alone, 0))
