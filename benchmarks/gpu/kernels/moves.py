"""Times kernels that only move K/V, and some torch operations that move the same bytes."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.inputs import DRY_SHAPES, SHAPES, Shape, random_cache
from kernels.cache.block_copy import copy_blocks
from kernels.cache.cache_table import cache_table
from kernels.cache.cache_write import write_kv
from kernels.cache.swap import gather_blocks, scatter_blocks

NUM_LAYERS = 32


def run(bench: Bench) -> None:
    shape = DRY_SHAPES[1] if bench.is_dry else SHAPES[1]
    for layout in ("NHD", "HND"):
        for num_tokens in (5,) if bench.is_dry else (64, 1024, 8192):
            fp8 = torch.uint8 if bench.is_dry else torch.float8_e4m3fn
            for dtype in (bench.dtype, fp8):
                what = f"cache write {num_tokens} {layout}"
                bench.attempt(what, partial(_cache_write, bench, shape, num_tokens, dtype, layout))
    for num_blocks in (3,) if bench.is_dry else (1, 64, 256):
        if bench.has_no_time_for("block moves"):
            return
        bench.attempt(f"moves of {num_blocks}", partial(_block_moves, bench, shape, num_blocks))


def _cache_write(
    bench: Bench, shape: Shape, num_tokens: int, dtype: torch.dtype, layout: str
) -> None:
    size = (num_tokens, shape.kv_heads, shape.head_dim)
    row_bytes = 2 * shape.kv_heads * shape.head_dim * (bench.dtype.itemsize + dtype.itemsize)
    num_sets = bench.num_sets(num_tokens * row_bytes, max_sets=64)
    pool = (num_sets * -(-num_tokens // 16), 16, shape.kv_heads, shape.head_dim)
    caches = [random_cache(pool, dtype, layout, bench.device) for _ in "kv"]
    slots = torch.randperm(pool[0] * 16, device=bench.device)
    sets = [
        (
            *torch.randn(2, *size, device=bench.device, dtype=bench.dtype),
            slots[i * num_tokens :][:num_tokens],
        )
        for i in range(num_sets)
    ]
    us = {"ours": bench.time_us([partial(write_kv, k, v, *caches, to) for k, v, to in sets])}
    if dtype == bench.dtype and layout == "NHD":
        us["torch"] = bench.time_us(
            [partial(_torch_write_kv, caches, k, v, to) for k, v, to in sets]
        )
    bench.row(
        what=f"cache write, {num_tokens} tokens",
        layout=layout,
        kv=str(dtype).removeprefix("torch."),
        bytes=num_tokens * row_bytes,
        us=us,
    )


def _torch_write_kv(caches: list[Tensor], key: Tensor, value: Tensor, slots: Tensor) -> None:
    for cache, rows in zip(caches, (key, value), strict=True):
        cache.flatten(0, 1).index_copy_(0, slots, rows)


def _block_moves(bench: Bench, shape: Shape, num_blocks: int) -> None:
    """Time block copies, gather and scatter over all layers, and the copy from staging to host."""
    num_layers = 2 if bench.is_dry else NUM_LAYERS
    pool = (2 * max(64, num_blocks), 16, shape.kv_heads, shape.head_dim)
    caches = [random_cache(pool, bench.dtype, "NHD", bench.device) for _ in range(2 * num_layers)]
    table = cache_table(caches)
    ids = torch.randperm(pool[0], device=bench.device)
    sources, targets = ids[:num_blocks], ids[num_blocks : 2 * num_blocks]
    staging = torch.empty(num_blocks, table.words_per_block, dtype=torch.int64, device=bench.device)
    host = torch.empty_like(staging, device="cpu", pin_memory=bench.device.type == "cuda")
    pairs = torch.stack([sources, targets], 1)
    num_bytes = 2 * staging.nbytes  # each byte is read and written
    for what, move in (
        ("block copy", partial(copy_blocks, table, pairs)),
        ("block copy by torch", partial(_torch_copy_blocks, caches, sources, targets)),
        ("gather", partial(gather_blocks, table, sources, staging)),
        ("scatter", partial(scatter_blocks, table, sources, staging)),
        ("staging to host", partial(host.copy_, staging, non_blocking=True)),
    ):
        name = f"{what}, {num_blocks} blocks of {num_layers} layers"
        moved = staging.nbytes if "host" in what else num_bytes
        bench.row(what=name, bytes=moved, us={"ours": bench.time_us([move])})


def _torch_copy_blocks(caches: list[Tensor], sources: Tensor, targets: Tensor) -> None:
    for cache in caches:
        cache.index_copy_(0, targets, cache.index_select(0, sources))
