"""Calls of the attention wrappers that between them reach what there is to specialise on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import cycle

import torch

from kernels.paged_arguments import BLOCK_SIZES, HEAD_DIMS
from kernels.paged_decode import paged_decode
from kernels.paged_prefill import paged_prefill

EXTRAS = (
    {},
    {"window": 1000, "softcap": 30.0, "sinks": True},
    {"window": 1000},
    {"softcap": 30.0},
    {"sinks": True},
)
HEADS = ((32, 8), (8, 8), (12, 4), (8, 1), (28, 4), (71, 1))
"""Groups of 4, 1, 3, 8, 7 and 71."""
FORMATS = (
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.uint8),
    (torch.float16, torch.uint8),
    (torch.bfloat16, torch.float8_e4m3fn),
    (torch.float16, torch.float8_e4m3fn),
)
"""Query and cache."""


@dataclass(frozen=True)
class Variant:
    kernel: str
    head_dim: int
    heads: tuple[int, int] = (32, 8)
    formats: tuple[torch.dtype, torch.dtype] = FORMATS[0]
    block_size: int = 16
    extras: int = 0
    num_splits: int = 4
    layout: str = "NHD"
    ids: torch.dtype = torch.int64

    def runs_on(self, arch: int) -> bool:
        return arch >= 89 or self.formats[1] != torch.float8_e4m3fn

    def __str__(self) -> str:
        query, cache = (str(dtype).removeprefix("torch.") for dtype in self.formats)
        heads, kv_heads = self.heads
        extras = "+".join(EXTRAS[self.extras]) or "plain"
        splits = f"-{self.num_splits} splits" if self.kernel == "decode" else ""
        return (
            f"{self.kernel}-{self.head_dim}-{heads}/{kv_heads}-{query}/{cache}"
            f"-{self.block_size}{self.layout}-{extras}{splits}"
        )

    def call(self) -> None:
        """The wrapper on CPU tensors with arbitrary contents, for the dry run."""
        num_heads, num_kv_heads = self.heads
        dtype, cache_dtype = self.formats
        shape = (9, self.block_size, num_kv_heads, self.head_dim)
        if self.layout == "HND":
            shape = (shape[0], shape[2], shape[1], shape[3])
        caches = [torch.empty(shape, dtype=cache_dtype) for _ in range(2)]
        if self.layout == "HND":
            caches = [cache.transpose(1, 2) for cache in caches]
        options = EXTRAS[self.extras] | {"scale": 0.1}
        if "sinks" in options:
            options["sinks"] = torch.empty(num_heads, dtype=dtype)
        query = torch.empty(5, num_heads, self.head_dim, dtype=dtype)
        tables, lens = torch.zeros(5, 7, dtype=self.ids), torch.ones(5, dtype=torch.int32)
        if self.kernel == "decode":
            options["num_splits"] = self.num_splits
            paged_decode(query, *caches, tables, lens, **options)
        else:
            starts = torch.arange(6, dtype=torch.int32)
            paged_prefill(query, *caches, tables, starts, lens, **options)


def representative(arch: int) -> list[Variant]:
    """Few enough for every change: on sm_86 and sm_90 each value of each parameter at least once.

    sm_80 and sm_89 share most of the compiler with them: there, what has its own row or type.
    """
    decode, prefill = Variant("decode", 128), Variant("prefill", 128)
    if arch == 80:
        return [
            replace(decode, formats=FORMATS[3], extras=1, num_splits=1),
            replace(prefill, extras=1),
            replace(prefill, head_dim=256),
        ]
    if arch == 89:
        return [replace(decode, formats=FORMATS[6]), replace(prefill, formats=FORMATS[6])]
    everywhere = [
        decode,
        replace(decode, heads=(28, 4), formats=FORMATS[4], extras=1, block_size=64, num_splits=1),
        replace(decode, head_dim=80, heads=(8, 8), extras=2, block_size=32, layout="HND"),
        replace(decode, head_dim=256, heads=(71, 1), extras=3, num_splits=64),
        replace(decode, head_dim=64, formats=FORMATS[3], extras=4, ids=torch.int32),
        replace(decode, head_dim=192, formats=FORMATS[2], num_splits=1),
        prefill,
        replace(prefill, heads=(12, 4), formats=FORMATS[4], extras=1, block_size=64),
        replace(prefill, head_dim=96, heads=(8, 8), extras=2, block_size=32, layout="HND"),
        replace(prefill, head_dim=256, heads=(71, 1), extras=3),
        replace(prefill, head_dim=64, formats=FORMATS[3], extras=4, ids=torch.int32),
        replace(prefill, head_dim=192, formats=FORMATS[2]),
    ]
    native = [replace(kernel, formats=FORMATS[5], heads=(8, 1)) for kernel in (decode, prefill)]
    return everywhere + [variant for variant in native if variant.runs_on(arch)]


def matrix(arch: int) -> list[Variant]:
    """Each head dim with each format, twice: the other parameters take turns beside them."""
    heads, extras, sizes, splits = cycle(HEADS), cycle(range(5)), cycle(BLOCK_SIZES), cycle((1, 16))
    layouts, ids = cycle(("NHD", "NHD", "HND")), cycle((torch.int64, torch.int32))
    variants = [
        Variant(
            kernel, head_dim, next(heads), formats, next(sizes), next(extras), next(splits),
            next(layouts), next(ids),
        )
        for kernel in ("decode", "prefill")
        for head_dim in HEAD_DIMS
        for formats in FORMATS
        for _ in range(2)
    ]  # fmt: skip
    return [variant for variant in variants if variant.runs_on(arch)]
