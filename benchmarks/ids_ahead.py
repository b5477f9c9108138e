"""Attention kernels that load block ids one tile ahead, against kernels that load them late.

Earlier kernels loaded the ids of a tile in the iteration that loads its K and V. To imitate them,
today's kernels run with a device function that loads the ids at that time. All else is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from types import FunctionType
from typing import Any
from unittest.mock import patch

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.bench import Bench
from benchmarks.decode import decode_calls
from benchmarks.inputs import DRY_SHAPES, SHAPES, Lengths, PagedInputs, Shape, make_inputs
from benchmarks.peers import Calls
from benchmarks.prefill import prefill_calls, prompts, work_by_rule
from kernels.attention.attention_tile import block_ids, row_offsets
from kernels.attention.paged_decode import paged_decode_kernel
from kernels.attention.paged_prefill import attend_tiles, paged_prefill_kernel

CASES = (
    ("decode", "64 x 4096", Lengths((1,) * 64, (4096,) * 64)),
    ("prefill", "4 x 8192", prompts(4, 8192)),
)
DRY_CASES = (
    ("decode", "2 x 100", Lengths((1,) * 2, (100,) * 2)),
    ("prefill", "5 over 150 cached", Lengths((5, 1), (155, 7))),
)
ONE_ROUNDING = 2**-7


@triton.jit
def rows_and_same_blocks(
    blocks, table_ptr, tile, context_len, block_stride, token_stride,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Load the ids of key tile `tile` and return its `row_offsets`. Return `blocks` unchanged.

    As `blocks` never changes and is not read, the compiler removes it from the loop.
    """
    ids = block_ids(table_ptr, tile, context_len, BLOCK_SIZE, BLOCK_N).to(blocks.dtype)
    rows = row_offsets(ids, tile, block_stride, token_stride, BLOCK_SIZE, BLOCK_N, PRECISION)
    return rows, blocks


@contextmanager
def ids_loaded_late() -> Iterator[None]:
    """Let paged attention load the block ids of a tile in the iteration that loads K and V."""
    with ExitStack() as patches:
        for name, kernel in _late_kernels().items():
            patches.enter_context(patch(f"kernels.{name}.{name}_kernel", kernel))
        yield


@cache
def _late_kernels() -> dict[str, Any]:
    """Return the kernels by module; cached, so that each is compiled only once."""
    late = {"rows_and_next_blocks": rows_and_same_blocks}
    return {
        "paged_decode": _calling(paged_decode_kernel, late),
        "paged_prefill": _calling(
            paged_prefill_kernel, {"attend_tiles": _calling(attend_tiles, late)}
        ),
    }


def _calling(kernel: Any, functions: dict[str, Any]) -> Any:
    """Return a copy of a Triton function in which `functions` replace those of the same names."""
    original = kernel.fn
    copy = FunctionType(original.__code__, original.__globals__ | functions, original.__name__)
    copy.__annotations__ = original.__annotations__
    # Triton's interpreter knows no specializations.
    options = ("do_not_specialize", "do_not_specialize_on_alignment")
    return triton.jit(**{name: getattr(kernel, name, None) for name in options})(copy)


def run(bench: Bench) -> None:
    shape = DRY_SHAPES[1] if bench.is_dry else SHAPES[1]
    for kernel, name, lengths in DRY_CASES if bench.is_dry else CASES:
        case = f"{kernel} {name}"
        if bench.has_no_time_for(f"{case} and the remaining cases"):
            return
        bench.attempt(case, partial(_measure, bench, kernel, name, lengths, shape))


def _measure(bench: Bench, kernel: str, name: str, lengths: Lengths, shape: Shape) -> None:
    kv_bytes = lengths.kv_bytes(shape, bench.dtype.itemsize)
    num_sets = bench.num_sets(kv_bytes, max_sets=4)
    inputs = make_inputs(shape, lengths, device=bench.device, dtype=bench.dtype, num_sets=num_sets)
    calls = _calls(bench, kernel, inputs, shape)
    ahead, us = _result(calls), {"ahead": bench.time_us(calls)}
    with ids_loaded_late():
        late, us["late"] = _result(calls), bench.time_us(calls)
    is_same = torch.allclose(ahead, late, rtol=ONE_ROUNDING, atol=1e-4)
    measure = {"bytes": kv_bytes} if kernel == "decode" else {"flop": lengths.flop(shape)}
    verdict = "ok" if is_same else "WRONG"
    bench.row(kernel=kernel, shape=str(shape), tokens=name, us=us, verdict=verdict, **measure)


def _result(calls: Calls) -> Tensor:
    """Return the result of the first call, and fill the calls' output with NaN."""
    out = calls[0]()
    result = out.clone()
    out.fill_(float("nan"))
    return result


def _calls(bench: Bench, kernel: str, inputs: PagedInputs, shape: Shape) -> Calls:
    if kernel == "decode":
        return decode_calls(bench, inputs, shape)
    return prefill_calls(inputs, work_by_rule(bench, inputs))
