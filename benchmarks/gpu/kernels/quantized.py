"""Checks and times linear layers with quantized weights, beside 16-bit weights and torch's FP8.

Results are compared with the dequantized weight in fp32.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.bench import Bench
from engine.model.linear import Format
from engine.model.quantization.at_load import QUANTIZERS, quantize_weight
from engine.model.quantization.formats import Dequantizing, ScaledFloat8, TritonCodes
from engine.model.quantization.weights import Float8Weight, IntegerWeight

MAX_ERROR = {"ours": 5e-3, "torch fp8": 5e-2}
"""Limits of |out - exact| / |exact|; torch's FP8 products also round the rows to FP8."""


def run(bench: Bench) -> None:
    sizes = [(48, 128)] if bench.is_dry else [(6144, 4096), (4096, 14336)]
    for outputs, inputs in sizes:
        for precision in QUANTIZERS:
            for num_rows in (3,) if bench.is_dry else (1, 16, 256, 4096):
                name = f"{precision} {outputs} x {inputs}, {num_rows} rows"
                if bench.has_no_time_for(name):
                    return
                bench.attempt(
                    name, partial(_row, bench, precision, outputs, inputs, num_rows, name)
                )


def _row(bench: Bench, precision: str, outputs: int, inputs: int, num_rows: int, name: str) -> None:
    dense = torch.randn(outputs, inputs, device=bench.device, dtype=bench.dtype)
    rows = torch.randn(num_rows, inputs, device=bench.device, dtype=bench.dtype)
    weight = quantize_weight(dense, precision, bench.device)
    assert isinstance(weight, IntegerWeight | Float8Weight)
    exact = Dequantizing(weight).multiply(rows.float(), None)
    num_bytes = TritonCodes(weight).num_bytes
    count = bench.num_sets(num_bytes)
    formats: dict[str, list[Format]] = {"ours": [TritonCodes(weight) for _ in range(count)]}
    has_fp8 = not bench.is_dry and torch.cuda.get_device_capability() >= (8, 9)
    if has_fp8 and isinstance(weight, Float8Weight) and ScaledFloat8.supports(weight, bench.dtype):
        copies = [weight.with_tensors(weight.codes.clone(), weight.scales) for _ in range(count)]
        formats["torch fp8"] = [ScaledFloat8(copy) for copy in copies]
    is_right = all(
        _error(formats[kind][0].multiply(rows, None), exact) < MAX_ERROR[kind] for kind in formats
    )
    us = {
        kind: bench.time_us([partial(format.multiply, rows, None) for format in weights])
        for kind, weights in formats.items()
    }
    copies = [dense.clone() for _ in range(bench.num_sets(dense.nbytes))]
    us["16 bits"] = bench.time_us([partial(F.linear, rows, copy) for copy in copies])
    flop = 2 * num_rows * outputs * inputs
    bench.row(what=name, bytes=num_bytes, flop=flop, us=us, verdict="ok" if is_right else "WRONG")


def _error(product: Tensor, exact: Tensor) -> float:
    return float((product.float() - exact).norm() / exact.norm())
