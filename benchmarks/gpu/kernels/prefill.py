"""Prefill attention over paged K/V, compared with SDPA over contiguous K/V and with FlashInfer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend

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
from kernels.attention.paged_prefill import paged_prefill
from kernels.attention.prefill_splits import prefill_work, wanted_splits
from kernels.attention.prefill_work import PrefillWork
from kernels.attention.split_results import scratch_numel

MAX_NEW_TOKENS = 2**18
"""Cases with more new tokens are skipped: they take seconds and show nothing new."""


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    shape: Shape
    lengths: Lengths
    block_size: int = 16
    layout: str = "NHD"

    @property
    def fits_sdpa(self) -> bool:
        """Whether SDPA can run this case: whole prompts of one length in the default layout."""
        lengths = {*self.lengths.contexts, *self.lengths.queries}
        return len(lengths) == 1 and (self.block_size, self.layout) == (16, "NHD")

    def __str__(self) -> str:
        return f"{self.shape} {self.name}"


def run(bench: Bench) -> None:
    for case in _dry_cases() if bench.is_dry else _cases():
        if bench.has_no_time_for(f"{case} and the remaining cases"):
            return
        if sum(case.lengths.queries) > MAX_NEW_TOKENS:
            bench.note(f"{case} skipped: more than {MAX_NEW_TOKENS} new tokens")
        else:
            bench.attempt(str(case), lambda case=case: _measure(bench, case))


def prefill_calls(inputs: PagedInputs, work: PrefillWork | None = None) -> peers.Calls:
    """Return a call of our kernel for each input set, with output and scratch preallocated.

    work: the work list, or None for one without splits. Building it is not timed, because all
    layers share it.
    """
    work = work or _work(inputs, 0)
    out = inputs.new_out()
    _, num_heads, head_dim = out.shape
    scratch = torch.empty(scratch_numel(work.num_slots, num_heads, head_dim), device=out.device)
    return [
        lambda table=table: paged_prefill(
            inputs.query,
            inputs.key_cache,
            inputs.value_cache,
            table,
            inputs.query_starts,
            inputs.context_lens,
            scale=inputs.scale,
            work=work,
            out=out,
            scratch=scratch,
        )
        for table in inputs.tables
    ]


def work_by_rule(bench: Bench, inputs: PagedInputs) -> PrefillWork:
    """Return the work list that the engine would make if the host knew the lengths."""
    lengths = list(zip(inputs.lengths.queries, inputs.lengths.contexts, strict=True))
    longest = max(inputs.lengths.contexts)
    sizes = (inputs.query, inputs.key_cache, lengths, bench.num_processors, longest)
    return _work(inputs, wanted_splits(*sizes))


def prompts(batch: int, length: int) -> Lengths:
    """Return the lengths of a batch of whole prompts without cached tokens."""
    return Lengths((length,) * batch, (length,) * batch)


def _cases() -> Iterator[Case]:
    for shape in reversed(SHAPES):
        yield Case("4 x 8192", shape, prompts(4, 8192))
        for length in (4096, 1024, 16384):
            for batch in (1, 16, 64, 128):
                yield Case(f"{batch} x {length}", shape, prompts(batch, length))
    for shape in reversed(SHAPES):
        mixed = Lengths((2048,) + (1,) * 64, (2048,) + (4096,) * 64)
        yield Case("512 over 8192 cached", shape, Lengths((512,), (8704,)))
        yield Case("2048 new, 64 decode at 4096", shape, mixed)
        yield Case("16 x ≤4096", shape, Lengths(ragged(16, 4096), ragged(16, 4096)))
        for block_size, layout in ((16, "HND"), (32, "NHD")):
            yield Case("16 x 4096", shape, prompts(16, 4096), block_size, layout)


def _dry_cases() -> Iterator[Case]:
    many, few = DRY_SHAPES
    yield Case("2 x 20", few, prompts(2, 20))
    yield Case("5 over 16 cached", many, Lengths((5, 1), (21, 7)), 32, "HND")


def _measure(bench: Bench, case: Case) -> None:
    lengths, shape = case.lengths, case.shape
    kv_bytes = lengths.kv_bytes(shape, bench.dtype.itemsize)
    query_bytes = lengths.query_bytes(shape, bench.dtype.itemsize)
    num_sets = bench.num_sets(kv_bytes, max_sets=4)
    if not bench.fits(2 * kv_bytes * num_sets + 4 * query_bytes, str(case)):
        return
    inputs = make_inputs(
        shape,
        lengths,
        device=bench.device,
        dtype=bench.dtype,
        block_size=case.block_size,
        layout=case.layout,
        num_sets=num_sets,
    )
    us = {"ours": bench.time_us(prefill_calls(inputs, work_by_rule(bench, inputs)))}
    if case.fits_sdpa:
        for name, backend in (
            ("sdpa", SDPBackend.FLASH_ATTENTION),
            ("cudnn", SDPBackend.CUDNN_ATTENTION),
        ):
            us[name] = bench.attempt(
                f"SDPA {name} at {case}",
                lambda backend=backend: bench.time_us(peers.sdpa_prefill(inputs, shape, backend)),
            )
    if bench.has_flashinfer():
        us["flashinfer"] = bench.attempt(
            f"FlashInfer at {case}",
            lambda: bench.time_us(peers.flashinfer_prefill(inputs, shape, case.layout)),
        )
    bench.row(
        shape=str(shape),
        tokens=case.name,
        block=case.block_size,
        layout=case.layout,
        flop=lengths.flop(shape),
        us=us,
    )


def _work(inputs: PagedInputs, num_splits: int) -> PrefillWork:
    sizes = (inputs.query, inputs.key_cache, inputs.query_starts, inputs.context_lens)
    return prefill_work(*sizes, num_splits)
