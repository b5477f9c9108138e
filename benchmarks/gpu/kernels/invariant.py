"""Checks and times option.batch_invariant's kernels beside the default ones, and compares bits.

Rows of a product are computed alone and among others; a token's attention as a decode, as a part of
its prompt, with splits and without.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.kernels.decode import decode_calls
from benchmarks.gpu.kernels.prefill import prefill_calls, work_by_rule
from benchmarks.gpu.paged_inputs import (
    DRY_SHAPES,
    SHAPES,
    TOLERANCE,
    Lengths,
    PagedInputs,
    Shape,
    dtype_name,
    make_inputs,
    relative_error,
)
from kernels.attention.paged_prefill import paged_prefill
from kernels.attention.prefill_splits import segment_work, wanted_segments
from kernels.attention.prefill_work import PrefillWork
from kernels.linear.grouped_linear import grouped_linear
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


def check(bench: Bench) -> None:
    """Check the results, and the bits of a row alone and among others."""
    for dtype in (bench.dtype,) if bench.is_dry else TOLERANCE:
        for num_inputs in (64, 40) if bench.is_dry else (4096, 1000):
            case = f"{dtype_name(dtype)} of {num_inputs} inputs"
            bench.attempt(case, partial(_check_products, bench, case, dtype, num_inputs))
    for shape, dtype, cache_dtype, is_usual in _dry_segments() if bench.is_dry else _segments():
        types = f"{dtype_name(dtype)} over {dtype_name(cache_dtype)}"
        case = f"segments {shape} {types}{'' if is_usual else ' window sinks'}"
        sizes = (shape, dtype, cache_dtype, is_usual)
        bench.attempt(case, partial(_check_segments, bench, case, *sizes))


def _segments() -> Iterator[tuple[Shape, torch.dtype, torch.dtype, bool]]:
    """Yield shapes, types of queries and of caches, and whether there are no window and sinks."""
    usual, bf16 = SHAPES[1], torch.bfloat16
    yield usual, bf16, bf16, True
    yield usual, bf16, bf16, False
    yield usual, bf16, torch.float8_e4m3fn, True
    yield Shape(16, 4, 64), bf16, bf16, False
    yield Shape(16, 4, 512), bf16, bf16, True
    yield usual, torch.float16, torch.float16, True
    yield usual, torch.float32, torch.float32, True


def _dry_segments() -> Iterator[tuple[Shape, torch.dtype, torch.dtype, bool]]:
    yield DRY_SHAPES[1], torch.float16, torch.float16, False


def _check_products(bench: Bench, case: str, dtype: torch.dtype, num_inputs: int) -> None:
    """Check the products of one weight, and of the second of two experts."""
    options = {"dtype": dtype, "device": bench.device}
    num_rows, counts = (8, (1, 3)) if bench.is_dry else (NUM_OTHERS, (1, 16, 65))
    rows, weights = (
        torch.randn(num_rows, num_inputs, **options),
        torch.randn(2, 96, num_inputs, **options),
    )
    bias, half = torch.randn(96, **options), num_rows // 2

    def of_one(part: Tensor, _: int) -> Tensor:
        return pinned_linear(part, weights[1], bias)

    def of_expert(part: Tensor, first: int) -> Tensor:
        ends = torch.tensor([first, len(part)], dtype=torch.int32, device=bench.device)
        return grouped_linear(part, weights, ends, is_pinned=True)

    exact = rows[half:].double() @ weights[1].double().T
    for name, products, expected in (
        ("pinned_linear", of_one, exact + bias.double()),
        ("pinned grouped_linear", of_expert, exact),
    ):
        among = products(rows, half)[half:]
        is_same = all(torch.equal(products(rows[-n:], 0), among[-n:]) for n in counts)
        error = relative_error(among, expected)
        _check_row(bench, f"{name} {case}", error, is_same, dtype)


def _check_segments(
    bench: Bench,
    case: str,
    shape: Shape,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    is_usual: bool,
) -> None:
    num_splits, queries = (4, (1, 5, 2)) if bench.is_dry else (64, (1, 1, 1, 5, 16, 129, 1024, 512))
    contexts = (33, 16, 1100) if bench.is_dry else (1, 900, 4096, 25, 16, 500, 1024, 3000)
    inputs = make_inputs(
        shape,
        Lengths(queries, contexts),
        device=bench.device,
        dtype=dtype,
        cache_dtype=cache_dtype,
    )
    options: dict[str, Any] = {}
    if not is_usual:
        sinks = torch.randn(shape.heads, device=bench.device)
        options = {"window": contexts[-1] - 40, "sinks": sinks}
    got = _attend(inputs, inputs.tables[0], _work(inputs, num_splits, **options), **options)
    error = relative_error(got, inputs.exact(**options))
    _check_row(bench, case, error, _has_these_bits(inputs, got, **options), dtype)


def _check_row(bench: Bench, case: str, error: float, is_same: bool, dtype: torch.dtype) -> None:
    verdict = "ok" if is_same and error < TOLERANCE[dtype] else "WRONG"
    bench.row(case=case, out=error, bits="same" if is_same else "other", verdict=verdict)


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
    is_same = _has_these_bits(inputs, _attend(inputs, inputs.tables[0], work))
    flop, verdict = lengths.flop(shape), "ok" if is_same else "OTHER BITS"
    bench.row(what=name, bytes=num_bytes, flop=flop, us=us, verdict=verdict)


def _has_these_bits(inputs: PagedInputs, got: Tensor, **options: Any) -> bool:
    """Return whether attention without splits has the same bits, and the last token alone, too."""
    table = inputs.tables[0]
    whole = _attend(inputs, table, _work(inputs, 0, **options), **options)
    return torch.equal(got, whole) and torch.equal(
        got[-1:], _last_token_alone(inputs, table, **options)
    )


def _work(
    inputs: PagedInputs, num_splits: int, *, window: int | None = None, **_: Any
) -> PrefillWork:
    lengths = (inputs.query_starts, inputs.context_lens)
    return segment_work(inputs.query, inputs.key_cache, *lengths, num_splits, window=window)


def _attend(inputs: PagedInputs, table: Tensor, work: PrefillWork, **options: Any) -> Tensor:
    caches = (inputs.key_cache, inputs.value_cache)
    lengths = (inputs.query_starts, inputs.context_lens)
    options |= {"scale": inputs.scale, "work": work}
    return paged_prefill(inputs.query, *caches, table, *lengths, **options)


def _last_token_alone(inputs: PagedInputs, table: Tensor, **options: Any) -> Tensor:
    """Return the attention of the last sequence's last token, computed as a decode."""
    alone = replace(
        inputs,
        query=inputs.query[-1:],
        query_starts=inputs.query_starts[:2].clamp(max=1),
        context_lens=inputs.context_lens[-1:],
    )
    return _attend(alone, table[-1:], _work(alone, 0, **options), **options)
