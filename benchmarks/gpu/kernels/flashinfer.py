"""Lets FlashInfer build its kernels before they are timed; the first build takes minutes."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.kernels import latents, peers
from benchmarks.gpu.paged_inputs import SHAPES, Lengths, PagedInputs, Shape, make_inputs

Build = Callable[[PagedInputs, Shape], peers.Calls]


def run(bench: Bench) -> None:
    if not bench.has_flashinfer():
        bench.note("FlashInfer is not installed; skipping comparisons with it")
        return
    for shape in SHAPES:
        for build, num_new in ((peers.flashinfer_decode, 1), (peers.flashinfer_prefill, 64)):
            _build(bench, shape, num_new, build)
    # Last: without it, only the section `latents` has no peer.
    shape = latents.SHAPES[0]
    bench.attempt(
        f"FlashInfer's build for {shape}",
        lambda: _build(bench, shape, 1, peers.flashinfer_latents),
    )


def _build(bench: Bench, shape: Shape, num_new: int, build: Build) -> None:
    lengths = Lengths((num_new,) * 2, (64,) * 2)
    inputs = make_inputs(shape, lengths, device=bench.device, dtype=bench.dtype)
    us = bench.time_us(build(inputs, shape))
    what = f"{shape}, {num_new} new tokens of 64, after the build"
    bench.row(what=what, us={"flashinfer": us})
