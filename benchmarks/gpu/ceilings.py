"""Copy and matmul rates of the GPU, the ceilings of the other sections' figures."""

from __future__ import annotations

import torch

from benchmarks.gpu.bench import Bench


def run(bench: Bench) -> None:
    for mebibytes in (1,) if bench.is_dry else (1024, 4096):
        words = torch.randn(mebibytes * 2**18, device=bench.device)
        target = torch.empty_like(words)
        # A graph would give Tensor.copy_ to a copy engine, which is slower than kernels are.
        us = bench.time_us([lambda words=words, target=target: torch.neg(words, out=target)])
        bench.row(what=f"copy {mebibytes} MiB", bytes=2 * words.nbytes, us={"torch": us})
    for size in (64,) if bench.is_dry else (4096, 8192):
        a, b = (torch.randn(size, size, device=bench.device, dtype=bench.dtype) for _ in range(2))
        product = torch.empty_like(a)
        us = bench.time_us([lambda a=a, b=b, out=product: torch.mm(a, b, out=out)])
        bench.row(what=f"matmul {size} {_name(bench.dtype)}", flop=2 * size**3, us={"torch": us})


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
