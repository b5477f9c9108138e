"""Decode attention over latents (DeepSeek's MLA), compared with FlashInfer."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.kernels import peers
from benchmarks.gpu.kernels.decode import Case, decode_calls
from benchmarks.gpu.paged_inputs import Shape, make_inputs
from kernels.arguments import LATENT_DIMS

SHAPES = tuple(Shape(heads, 1, *LATENT_DIMS[0]) for heads in (16, 128))
"""DeepSeek V2 Lite, or V3 on eight GPUs; V3 on one GPU."""
DRY_SHAPE = Shape(4, 1, *LATENT_DIMS[1])


def run(bench: Bench) -> None:
    for case in _dry_cases() if bench.is_dry else _cases():
        if bench.has_no_time_for(f"{case} and the remaining cases"):
            return
        bench.attempt(str(case), lambda case=case: _measure(bench, case))


def _cases() -> Iterator[Case]:
    for context in (4096, 1024, 16384):
        for batch in (64, 16, 128, 1):
            yield from (Case(shape, batch, context) for shape in SHAPES)


def _dry_cases() -> Iterator[Case]:
    yield Case(DRY_SHAPE, 2, 40)


def _measure(bench: Bench, case: Case) -> None:
    lengths, shape = case.lengths, case.shape
    kv_bytes = lengths.kv_bytes(shape, bench.dtype.itemsize)
    num_sets = bench.num_sets(kv_bytes)
    if not bench.fits(2 * kv_bytes * num_sets, str(case)):  # FlashInfer has a copy
        return
    inputs = make_inputs(shape, lengths, device=bench.device, dtype=bench.dtype, num_sets=num_sets)
    us = {"ours": bench.time_us(decode_calls(bench, inputs, shape))}
    if bench.has_flashinfer():
        us["flashinfer"] = bench.attempt(
            f"FlashInfer at {case}",
            lambda: bench.time_us(peers.flashinfer_latents(inputs, shape)),
        )
    bench.row(
        shape=str(shape),
        batch=case.batch,
        context=case.context,
        bytes=kv_bytes + lengths.query_bytes(shape, bench.dtype.itemsize),
        flop=lengths.flop(shape),
        us=us,
    )
