"""Checks and times products with quantized experts.

Two alternatives are timed too: dequantizing all experts for each product, and 16-bit experts.
Results are compared with those of the dequantized experts in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench
from engine.model.linear import Quantized
from engine.model.mixtures.experts import choose_grouped
from engine.model.quantization.at_load import QUANTIZERS, quantize_weight
from engine.model.quantization.experts import DequantizingExperts, TritonExperts
from engine.model.quantization.kernel_codes import has_kernel
from engine.model.quantization.weights import Float4Weight

MAX_ERROR = 5e-3
"""Limit of |out - exact| / |exact|."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of one projection of all experts, and the number of experts per token."""

    num_experts: int
    outputs: int
    inputs: int
    top_k: int


GPT_OSS_20B = Sizes(32, 5760, 2880, 4)
"""The sizes of the merged gate and up projections."""


def run(bench: Bench) -> None:
    sizes = Sizes(4, 48, 64, 2) if bench.is_dry else GPT_OSS_20B
    for precision in (*QUANTIZERS, "mxfp4"):
        if bench.has_no_time_for(precision):
            return
        weight = bench.attempt(precision, partial(_weight, bench, precision, sizes))
        for num_tokens in (3,) if bench.is_dry else (1, 50, 1024):
            name = f"{precision}, {num_tokens} tokens"
            if weight is None or bench.has_no_time_for(name):
                break
            bench.attempt(name, partial(_row, bench, weight, sizes, num_tokens, name))


def _weight(bench: Bench, precision: str, sizes: Sizes) -> Quantized:
    """Return random experts [experts * out, in]."""
    rows, columns, device = sizes.num_experts * sizes.outputs, sizes.inputs, bench.device
    if precision in QUANTIZERS:
        dense = torch.randn(rows, columns, device=device, dtype=bench.dtype)
        return quantize_weight(dense, precision, device)
    codes = torch.randint(256, (rows, columns // 2), device=device, dtype=torch.uint8)
    exponents = torch.randint(118, 128, (rows, columns // 32), device=device, dtype=torch.uint8)
    return Float4Weight(codes, exponents)


def _row(bench: Bench, weight: Quantized, sizes: Sizes, num_tokens: int, name: str) -> None:
    scores = torch.rand(num_tokens, sizes.num_experts, device=bench.device)
    by_expert, _ = scores.topk(sizes.top_k, -1).indices.flatten().sort()
    ids = torch.arange(sizes.num_experts, device=bench.device)
    ends = torch.searchsorted(by_expert, ids, right=True, out_int32=True)
    rows = torch.randn(len(by_expert), sizes.inputs, device=bench.device, dtype=bench.dtype)
    assert has_kernel(weight)
    ours = TritonExperts(weight, sizes.num_experts)
    dequantizing = DequantizingExperts([weight], sizes.num_experts, bench.dtype)
    grouped = choose_grouped(bench.device, bench.dtype)
    product, exact = ours.multiply(rows, ends), _exact(rows, weight, ends)
    is_right = float((product.float() - exact).norm() / exact.norm()) < MAX_ERROR
    count = bench.num_sets(ours.num_bytes)
    copies = [ours, *(TritonExperts(weight, sizes.num_experts) for _ in range(count - 1))]
    dense = dequantizing.dense()
    us = {
        "ours": bench.time_us([partial(experts.multiply, rows, ends) for experts in copies]),
        "dequantized": bench.time_us([lambda: grouped(rows, dequantizing.dense(), ends)]),
        "16 bits": bench.time_us([partial(grouped, rows, dense, ends)]),
    }
    share = len(by_expert.unique()) / sizes.num_experts
    flop = 2 * len(rows) * sizes.outputs * sizes.inputs
    bench.row(
        what=name,
        bytes=int(share * ours.num_bytes),
        flop=flop,
        us=us,
        verdict="ok" if is_right else "WRONG",
    )


def _exact(rows: Tensor, weight: Quantized, ends: Tensor) -> Tensor:
    dense = DequantizingExperts([weight], len(ends), torch.float32).dense()
    counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
    parts = zip(rows.float().split(counts), dense, strict=True)
    return torch.cat([part @ matrix.T for part, matrix in parts])
