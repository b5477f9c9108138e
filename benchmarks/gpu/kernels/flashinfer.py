"""Lets FlashInfer build its kernels before they are timed; the first build takes minutes."""

from __future__ import annotations

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.inputs import SHAPES, Lengths, make_inputs
from benchmarks.gpu.kernels import peers


def run(bench: Bench) -> None:
    if not bench.has_flashinfer():
        bench.note("FlashInfer is not installed; skipping comparisons with it")
        return
    for shape in SHAPES:
        for build, num_new in ((peers.flashinfer_decode, 1), (peers.flashinfer_prefill, 64)):
            lengths = Lengths((num_new,) * 2, (64,) * 2)
            inputs = make_inputs(shape, lengths, device=bench.device, dtype=bench.dtype)
            us = bench.time_us(build(inputs, shape, "NHD"))
            what = f"{shape}, {num_new} new tokens of 64, after the build"
            bench.row(what=what, us={"flashinfer": us})
