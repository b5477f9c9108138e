"""Swapping out on a stream beside a step's kernels, against copies on the kernels' own stream."""

from __future__ import annotations

import math
from functools import partial

import torch

from benchmarks.bench import Bench
from benchmarks.inputs import DRY_SHAPES, SHAPES, Shape, random_cache
from engine.step.block_mover import MAX_SWAP_ROWS, CopyStream
from kernels.cache.cache_table import cache_table
from kernels.cache.swap import gather_blocks

NUM_LAYERS = 32


def run(bench: Bench) -> None:
    bench.attempt("swapping out", partial(_measure, bench))


def _measure(bench: Bench) -> None:
    """Time a decode step's matrix products while blocks are swapped out.

    The products alone take twice as long as the copies to the host. So with a stream of their own,
    the copies can end before the products do.
    """
    shape, num_layers, num_blocks = SHAPES[1], NUM_LAYERS, MAX_SWAP_ROWS
    hidden, width = 4096, 14336
    if bench.is_dry:
        shape, num_layers, num_blocks = DRY_SHAPES[1], 2, 3
        hidden, width = 64, 96
    swap = Swap(bench, shape, num_layers, num_blocks)
    rows, weight, out = (
        torch.randn(size, dtype=bench.dtype, device=bench.device)
        for size in ((64, hidden), (hidden, width), (64, width))
    )

    def multiply(num_products: int) -> None:
        for _ in range(num_products):
            torch.mm(rows, weight, out=out)

    def step(copies: CopyStream, num_products: int) -> None:
        swap.launch(copies)
        multiply(num_products)
        copies.finish()

    copy_us, product_us = bench.time_us([swap.copy_to_host]), bench.time_us([partial(multiply, 1)])
    count = math.ceil(2 * copy_us / product_us) if copy_us and product_us else 2
    us = {
        name: bench.time_us([partial(step, CopyStream(device), count)])
        # On a CPU, a CopyStream has no stream of its own.
        for name, device in (("own stream", bench.device), ("one stream", torch.device("cpu")))
    }
    bench.row(
        blocks=num_blocks,
        layers=num_layers,
        products=count,
        us=us,
        **{
            "copies alone us": copy_us,
            "products alone us": bench.time_us([partial(multiply, count)]),
        },
    )


class Swap:
    """Swaps out blocks of all layers, as `BlockMover` does."""

    def __init__(self, bench: Bench, shape: Shape, num_layers: int, num_blocks: int) -> None:
        pool = (num_blocks, 16, shape.kv_heads, shape.head_dim)
        self._table = cache_table(
            [random_cache(pool, bench.dtype, "NHD", bench.device) for _ in range(2 * num_layers)]
        )
        self._blocks = torch.randperm(num_blocks, device=bench.device)
        self._buffer = torch.empty(
            num_blocks, self._table.words_per_block, dtype=torch.int64, device=bench.device
        )
        is_cuda = bench.device.type == "cuda"
        self._host = torch.empty_like(self._buffer, device="cpu", pin_memory=is_cuda)

    def launch(self, copies: CopyStream) -> None:
        gather_blocks(self._table, self._blocks, self._buffer)
        with copies.after_kernels():
            self.copy_to_host()

    def copy_to_host(self) -> None:
        for host_block, block in zip(self._host, self._buffer, strict=True):
            host_block.copy_(block, non_blocking=True)
