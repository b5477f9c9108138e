"""Our kernels against torch's FlexAttention over paged K/V.

FlexAttention uses pages of 128 tokens, the smallest that its kernels support.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.attention.experimental._paged_attention import PagedAttention
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.inputs import DRY_SHAPES, SHAPES, Lengths, Shape, make_inputs
from benchmarks.gpu.kernels.decode import decode_calls
from benchmarks.gpu.kernels.prefill import prefill_calls, prompts

PAGE_SIZE = 128


def run(bench: Bench) -> None:
    shapes = (DRY_SHAPES[1],) if bench.is_dry else tuple(reversed(SHAPES))
    length = PAGE_SIZE if bench.is_dry else 4096
    for batch, num_queries in ((2, 1),) if bench.is_dry else ((64, 1), (16, 1), (1, length)):
        for shape in shapes:
            case = f"{shape} {batch} x {num_queries} new of {length}"
            if bench.has_no_time_for(f"{case} and the remaining cases"):
                return
            lengths = Lengths((num_queries,) * batch, (length,) * batch)
            bench.attempt(case, partial(_measure, bench, shape, lengths, case))


def _measure(bench: Bench, shape: Shape, lengths: Lengths, case: str) -> None:
    inputs = make_inputs(shape, lengths, device=bench.device, dtype=bench.dtype)
    is_decode = lengths != prompts(len(lengths.contexts), lengths.contexts[0])
    ours = decode_calls(bench, inputs, shape) if is_decode else prefill_calls(inputs)
    us = {"ours": bench.time_us(ours)}
    us["flex"] = bench.attempt(case, lambda: bench.time_us([_flex_call(bench, shape, lengths)]))
    work: dict[str, Any] = {"flop": lengths.flop(shape)}
    if is_decode:
        work = {"bytes": lengths.kv_bytes(shape, bench.dtype.itemsize)}
    bench.row(case=case, **work, us=us)


def _flex_call(bench: Bench, shape: Shape, lengths: Lengths) -> Callable[[], Any]:
    """Return a call of FlexAttention for the newest tokens over PagedAttention's pages."""
    batch, num_queries, length = len(lengths.queries), lengths.queries[0], lengths.contexts[0]
    num_pages = batch * -(-length // PAGE_SIZE)
    paged = PagedAttention(num_pages, PAGE_SIZE, batch, device=bench.device.type)
    for row in range(batch):
        paged.reserve(*(torch.tensor([x], device=bench.device) for x in (row, length)))

    def is_visible(b: Any, h: Any, query: Any, key: Any) -> Any:
        return key <= query + (length - num_queries)

    logical = create_block_mask(
        is_visible, batch, None, num_queries, length, bench.device, (PAGE_SIZE, PAGE_SIZE)
    )
    mask = paged.convert_logical_block_mask(logical)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, device=bench.device, dtype=bench.dtype)

    query = random(batch, shape.heads, num_queries, shape.head_dim)
    keys, values = (
        random(1, shape.kv_heads, num_pages * PAGE_SIZE, shape.head_dim) for _ in range(2)
    )
    attend: Any = flex_attention if bench.is_dry else torch.compile(flex_attention, dynamic=False)
    return lambda: attend(
        query, keys, values, block_mask=mask, enable_gqa=shape.heads != shape.kv_heads
    )
