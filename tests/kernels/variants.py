"""Calls of the attention wrappers that between them reach what there is to specialise on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, cycle, islice, product
from typing import Any
from unittest.mock import patch

import torch

from kernels.paged_arguments import BLOCK_SIZES, HEAD_DIMS
from kernels.paged_decode import paged_decode
from kernels.paged_prefill import paged_prefill

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


def each(name: str, *kinds: Sequence[Any]) -> Parameter:
    """The parameter that is the field `name`."""
    return [[{name: value} for value in kind] for kind in kinds]


Parameter = list[list[dict[str, Any]]]
"""Its kinds; of a kind the values, as fields of a variant, that compile to much the same."""
SPLITS = (2, 4, 8, 16, 32, 64)
WINDOWS = each("window", [None], [1000], [1024])  # Triton tells multiples of 16 apart
SINKS = each("sinks", [False], [True])
COMMON = (
    each("block_size", *([size] for size in BLOCK_SIZES)),
    WINDOWS,
    each("softcap", [None], [30.0]),
    each("ids", [torch.int64], [torch.int32]),
    each("lens", [torch.int32], [torch.int64]),
)
PARAMETERS = {
    "prefill": (
        *COMMON,
        SINKS,
        # Heads fill a tile of tokens, or leave some of it idle, or take several tiles.
        each("group", [1, 2, 4, 8, 16], [3, 7, 12, 17, 24, 48], [71, 96]),
    ),
    "decode": (
        *COMMON,
        # A tile has 16 rows, or 32, or 64 where it may.
        each("group", [1, 2, 3, 4, 7, 8, 12, 16], [17, 24, 32], [48, 71]),
        # With several splits it is combining that sees the sinks.
        [
            [{"num_splits": 1, "sinks": False}],
            [{"num_splits": 1, "sinks": True}],
            [{"num_splits": splits, "sinks": False} for splits in SPLITS],
        ],
    ),
    "combine": (each("num_splits", *([splits] for splits in SPLITS)), WINDOWS, SINKS),
}
"""By kernel. Layout and number of KV heads make no variants, which test_compile.py checks."""


@dataclass(frozen=True)
class Variant:
    kernel: str
    """"decode", which has the kernel that combines splits after it, "combine" alone, "prefill"."""
    head_dim: int
    formats: tuple[torch.dtype, torch.dtype] = FORMATS[0]
    group: int = 4
    kv_heads: int = 2
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    num_splits: int = 4
    layout: str = "NHD"
    ids: torch.dtype = torch.int64
    lens: torch.dtype = torch.int32

    def runs_on(self, arch: int) -> bool:
        return arch >= 89 or self.formats[1] != torch.float8_e4m3fn

    def __str__(self) -> str:
        names = [
            str(dtype).removeprefix("torch.") for dtype in (*self.formats, self.ids, self.lens)
        ]
        query, cache, ids, lens = names
        extras = {
            "softcap": self.softcap,
            "sinks": self.sinks,
            f"window {self.window}": self.window,
        }
        return "-".join(
            [
                f"{self.kernel}-{self.head_dim}-{query}/{cache}-{self.group}x{self.kv_heads}",
                f"{self.block_size}{self.layout}",
                *(name for name, value in extras.items() if value),
                *([] if self.kernel == "prefill" else [f"{self.num_splits} splits"]),
                f"{ids}/{lens}",
            ]
        )

    def call(self) -> None:
        """The wrapper on CPU tensors with arbitrary contents, for the dry run."""
        dtype, cache_dtype = self.formats
        shape = (9, self.block_size, self.kv_heads, self.head_dim)
        if self.layout == "HND":
            shape = (shape[0], shape[2], shape[1], shape[3])
        caches = [torch.empty(shape, dtype=cache_dtype) for _ in range(2)]
        if self.layout == "HND":
            caches = [cache.transpose(1, 2) for cache in caches]
        num_heads = self.group * self.kv_heads
        query = torch.empty(5, num_heads, self.head_dim, dtype=dtype)
        tables, lens = torch.zeros(5, 7, dtype=self.ids), torch.ones(5, dtype=self.lens)
        options = {
            "scale": 0.1,
            "window": self.window,
            "softcap": self.softcap,
            "sinks": torch.empty(num_heads, dtype=dtype) if self.sinks else None,
        }
        if self.kernel == "prefill":
            starts = torch.arange(6, dtype=self.lens)
            paged_prefill(query, *caches, tables, starts, lens, **options)
        elif self.kernel == "decode":
            paged_decode(query, *caches, tables, lens, num_splits=self.num_splits, **options)
        else:
            with patch("kernels.paged_decode.paged_decode_kernel"):
                paged_decode(query, *caches, tables, lens, num_splits=self.num_splits, **options)


def representative(arch: int) -> list[Variant]:
    """Few enough for every change: on sm_86 and sm_90 each kind of each parameter at least once.

    sm_80 and sm_89 share most of the compiler with them: there, what has its own row or type.
    """
    decode, prefill = Variant("decode", 128), Variant("prefill", 128)
    everything = {"window": 1000, "softcap": 30.0, "sinks": True}
    half = {"formats": FORMATS[1], "group": 1, "window": 1024, "block_size": 32, "layout": "HND"}
    coded = {"formats": FORMATS[3], "sinks": True, "ids": torch.int32, "lens": torch.int64}
    if arch == 80:
        return [
            replace(decode, formats=FORMATS[3], num_splits=1, **everything),
            replace(prefill, **everything),
            replace(prefill, head_dim=256),
        ]
    if arch == 89:
        return [replace(decode, formats=FORMATS[6]), replace(prefill, formats=FORMATS[6])]
    everywhere = [
        decode,
        replace(decode, group=7, formats=FORMATS[4], block_size=64, num_splits=1, **everything),
        replace(decode, head_dim=80, **half),
        replace(decode, head_dim=96, group=48, num_splits=1),
        replace(decode, head_dim=256, group=71, kv_heads=1, softcap=30.0, num_splits=64),
        replace(decode, head_dim=64, group=24, **coded),
        replace(decode, head_dim=192, formats=FORMATS[2], num_splits=1),
        prefill,
        replace(prefill, group=3, formats=FORMATS[4], block_size=64, **everything),
        replace(prefill, head_dim=96, **half),
        replace(prefill, head_dim=80, group=17, softcap=30.0, block_size=64),
        replace(prefill, head_dim=256, group=71, kv_heads=1, softcap=30.0),
        replace(prefill, head_dim=64, **coded),
        replace(prefill, head_dim=192, formats=FORMATS[2]),
    ]
    native = [replace(kernel, formats=FORMATS[5], group=8) for kernel in (decode, prefill)]
    return everywhere + [variant for variant in native if variant.runs_on(arch)]


def matrix(arch: int) -> list[Variant]:
    """Each kernel with each head dim and format and, beside these, each kind of its parameters.

    Combining sees no cache, so there formats are those of the query alone.
    """
    variants = []
    for kernel, head_dim, formats in product(PARAMETERS, HEAD_DIMS, FORMATS):
        if kernel == "combine" and formats[0] != formats[1]:
            continue
        rng = random.Random(f"{arch} {kernel} {head_dim} {formats}")
        rows = covering(PARAMETERS[kernel], rng)
        variants += [Variant(kernel, head_dim, formats, **row) for row in rows]
    return [variant for variant in variants if variant.runs_on(arch)]


def covering(parameters: Sequence[Parameter], rng: random.Random) -> list[dict[str, Any]]:
    """As few rows of fields as have each kind of each parameter, which meet by chance."""
    count = max(len(kinds) for kinds in parameters)
    columns = [_turns(kinds, count, rng) for kinds in parameters]
    return [dict(chain.from_iterable(map(dict.items, row))) for row in zip(*columns, strict=True)]


def _turns(kinds: Parameter, count: int, rng: random.Random) -> list[dict[str, Any]]:
    """Values in any order, no kind more often than another but for one."""
    order = islice(cycle(rng.sample(kinds, len(kinds))), count)
    values = [rng.choice(kind) for kind in order]
    rng.shuffle(values)
    return values
