"""Decode attention over paged K/V, compared with SDPA over contiguous K/V and with FlashInfer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.kernels import peers
from benchmarks.gpu.paged_inputs import (
    DRY_SHAPES,
    SHAPES,
    Lengths,
    PagedInputs,
    Shape,
    make_inputs,
    ragged,
)
from kernels.attention.paged_decode import paged_decode, wanted_splits
from kernels.attention.split_results import scratch_numel
from kernels.attention.work_list import make_work_list

MODEL_LENGTH = 131072
"""The longest context that the model allows: the number of splits depends on it."""


@dataclass(frozen=True, slots=True)
class Case:
    shape: Shape
    batch: int
    context: int
    block_size: int = 16
    layout: str = "NHD"
    is_ragged: bool = False
    cache_dtype: torch.dtype | None = None
    """None stands for the queries' dtype."""

    def __str__(self) -> str:
        return f"{self.shape} batch {self.batch} context {self.context}"

    @property
    def lengths(self) -> Lengths:
        even = (self.context,) * self.batch
        contexts = ragged(self.batch, self.context) if self.is_ragged else even
        return Lengths((1,) * self.batch, contexts)


def run(bench: Bench) -> None:
    for case in _dry_cases() if bench.is_dry else _cases():
        if bench.has_no_time_for(f"{case} and the remaining cases"):
            return
        bench.attempt(str(case), lambda case=case: _measure(bench, case))


def decode_calls(bench: Bench, inputs: PagedInputs, shape: Shape) -> peers.Calls:
    """Return a call of our kernel for each input set, with outputs and scratch preallocated.

    The work list is the engine's for a model of up to MODEL_LENGTH tokens. Building it is not
    timed, because all layers share it.
    """
    num_wanted = wanted_splits(inputs.query, inputs.key_cache, bench.num_processors, MODEL_LENGTH)
    work = make_work_list(inputs.context_lens, num_wanted)
    scratch = torch.empty(
        scratch_numel(len(work.items), shape.heads, shape.value_dim), device=bench.device
    )
    out = inputs.new_out()
    return [
        lambda table=table: paged_decode(
            inputs.query,
            inputs.key_cache,
            inputs.value_cache,
            table,
            inputs.context_lens,
            scale=inputs.scale,
            work=work,
            out=out,
            scratch=scratch,
        )
        for table in inputs.tables
    ]


def _cases() -> Iterator[Case]:
    """Yield the grid in the default layout, then its variations; the most telling cases first."""
    grid = [
        (shape, batch, context)
        for shape in reversed(SHAPES)
        for context in (4096, 1024, 16384)
        for batch in (64, 16, 128, 1)
    ]
    yield from (Case(*point) for point in grid)
    yield from (Case(*point, cache_dtype=torch.float8_e4m3fn) for point in grid)
    yield from (Case(*point, is_ragged=True) for point in grid if point[1] > 1)
    short = [point for point in grid if point[2] <= 4096]
    for block_size, layout in ((64, "NHD"), (16, "HND")):
        yield from (Case(*point, block_size, layout) for point in short)


def _dry_cases() -> Iterator[Case]:
    many, few = DRY_SHAPES
    yield Case(few, 2, 40)
    yield Case(many, 2, 33, 32, "HND")
    yield Case(few, 3, 48, is_ragged=True)
    yield Case(few, 1, 20, cache_dtype=torch.uint8)


def _measure(bench: Bench, case: Case) -> None:
    lengths, shape = case.lengths, case.shape
    itemsize = (case.cache_dtype or bench.dtype).itemsize
    kv_bytes = lengths.kv_bytes(shape, itemsize)
    num_sets = bench.num_sets(kv_bytes)
    is_plain = case == Case(shape, case.batch, case.context)
    # SDPA has its own contiguous K/V of the same size.
    if not bench.fits(kv_bytes * num_sets * (2 if is_plain else 1), str(case)):
        return
    inputs = make_inputs(
        shape,
        lengths,
        device=bench.device,
        dtype=bench.dtype,
        cache_dtype=case.cache_dtype,
        block_size=case.block_size,
        layout=case.layout,
        num_sets=num_sets,
    )
    us = {"ours": bench.time_us(decode_calls(bench, inputs, shape))}
    if is_plain:
        us["sdpa"] = bench.attempt(
            f"SDPA at {case}", lambda: bench.time_us(peers.sdpa_decode(inputs, shape))
        )
    if bench.has_flashinfer() and case.cache_dtype is None:
        us["flashinfer"] = bench.attempt(
            f"FlashInfer at {case}",
            lambda: bench.time_us(peers.flashinfer_decode(inputs, shape, case.layout)),
        )
    bench.row(
        shape=str(shape),
        batch=case.batch,
        context=f"≤{case.context}" if case.is_ragged else case.context,
        block=case.block_size,
        layout=case.layout,
        kv=str(inputs.key_cache.dtype).removeprefix("torch."),
        bytes=kv_bytes + lengths.query_bytes(shape, bench.dtype.itemsize),
        us=us,
    )
