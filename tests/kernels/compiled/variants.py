"""Calls of the attention wrappers that together cover all specializations."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, cycle, islice, product
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from kernels.arguments import BLOCK_SIZES, EXPANDED_DIMS, HEAD_DIMS, LATENT_DIMS
from kernels.attention.paged_decode import paged_decode
from kernels.attention.paged_prefill import paged_prefill
from kernels.attention.prefill_splits import prefill_work, segment_work
from kernels.attention.prefill_work import PrefillWork
from kernels.attention.segments import combine_segments
from kernels.attention.split_results import combine_splits, split_results
from kernels.attention.work_list import WorkList

FORMATS = (
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.uint8),
    (torch.float16, torch.uint8),
    (torch.bfloat16, torch.float8_e4m3fn),
    (torch.float16, torch.float8_e4m3fn),
)
"""Dtypes of query and cache."""


def parameter(name: str, *kinds: Sequence[Any]) -> Parameter:
    """Return the parameter for the field `name`."""
    return [[{name: value} for value in kind] for kind in kinds]


Parameter = list[list[dict[str, Any]]]
"""The values of one field: a list for each kind of value. Values of the same kind compile to nearly
the same code."""
SINKS = parameter("sinks", [False], [True])
COMMON = (
    parameter("block_size", *([size] for size in BLOCK_SIZES)),
    parameter("softcap", [None], [30.0]),
    parameter("ids", [torch.int64], [torch.int32]),
)
LENS = parameter("lens", [torch.int32], [torch.int64])
PREFILL = (
    *COMMON,
    LENS,
    # Triton specializes on multiples of 16.
    parameter("window", [None], [1000], [1024]),
    SINKS,
    # Groups fill a tile, leave part of it idle, or take several tiles.
    parameter("group", [1, 2, 4, 8, 16], [3, 7, 12, 17, 24, 48], [71, 96]),
)
LATENTS = dict(LATENT_DIMS)
_ALIKE = {80: (80, 86, 89), 86: (80, 86, 89), 89: (80, 86, 89), 90: (90,)}
"""The GPUs that share the kinds of parameters, by GPU."""
PARAMETERS = {
    "prefill": PREFILL,
    "segments": PREFILL,
    "decode": (
        *COMMON,
        # A tile has 16, 32 or 64 rows.
        parameter("group", [1, 2, 3, 4, 7, 8, 12, 16], [17, 24, 32], [48, 71]),
        SINKS,
    ),
    "combine": (SINKS,),
    "combine segments": (SINKS,),
}
"""The parameters of each kernel. Layout and number of KV heads need no variants of their own,
which test_compile.py checks."""


@dataclass(frozen=True)
class Variant:
    kernel: str
    """"decode", "prefill", "segments" (prefill in segments), or the kernels that follow them where
    keys are split: "combine" and "combine segments"."""
    head_dim: int
    """Of queries and K; V has fewer dims in a latent."""
    formats: tuple[torch.dtype, torch.dtype] = FORMATS[0]
    group: int = 4
    kv_heads: int = 2
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    layout: str = "NHD"
    ids: torch.dtype = torch.int64
    lens: torch.dtype = torch.int32
    value_dim: int | None = None
    """Not None: V has other dims than K, and both lie in one row, as latents expand to."""

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
            f"V{self.value_dim}": self.value_dim,
        }
        return "-".join(
            [
                f"{self.kernel}-{self.head_dim}-{query}/{cache}-{self.group}x{self.kv_heads}",
                f"{self.block_size}{self.layout}",
                *(name for name, value in extras.items() if value),
                f"{ids}/{lens}",
            ]
        )

    def call(self) -> None:
        """Call the wrapper on CPU tensors with arbitrary contents, for the dry run."""
        dtype, cache_dtype = self.formats
        row_dim = self.head_dim + (self.value_dim or 0)
        shape = (9, self.block_size, self.kv_heads, row_dim)
        if self.layout == "HND":
            shape = (shape[0], shape[2], shape[1], shape[3])
        keys, values = (torch.empty(shape, dtype=cache_dtype) for _ in range(2))
        if self.layout == "HND":
            keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        if self.value_dim is not None:
            keys, values = keys.tensor_split([self.head_dim], -1)
        if self.head_dim in LATENTS:
            values = keys[..., : LATENTS[self.head_dim]]
        num_heads = self.group * self.kv_heads
        query = torch.empty(5, num_heads, self.head_dim, dtype=dtype)
        tables, lens = torch.zeros(5, 7, dtype=self.ids), torch.ones(5, dtype=self.lens)
        options = {
            "scale": 0.1,
            "window": self.window,
            "softcap": self.softcap,
            "sinks": torch.empty(num_heads, dtype=dtype) if self.sinks else None,
        }
        if self.kernel in ("prefill", "segments"):
            starts = torch.arange(6, dtype=self.lens)
            arguments = (query, keys, values, tables, starts, lens)
            paged_prefill(*arguments, work=self._work(query, keys, starts), **options)
        elif self.kernel == "decode":
            # As many items as sequences: the combining kernel is not launched.
            work = WorkList(torch.empty(5, 4).int(), torch.empty(5, 3).int())
            paged_decode(query, keys, values, tables, lens, work=work, **options)
        else:
            self._combine(query, options["sinks"])

    def _work(self, query: Tensor, cache: Tensor, starts: Tensor) -> PrefillWork:
        """Return a list without room for splits: the combining kernel is not launched."""
        if self.kernel == "segments":
            return segment_work(query, cache, starts, starts[1:], 0)
        with patch("kernels.attention.prefill_work.prefill_work_kernel"):
            return prefill_work(query, cache, starts, starts[1:], 0)

    def _combine(self, query: Tensor, sinks: Tensor | None) -> None:
        rows = torch.empty(5, 3, dtype=torch.int32)
        combine = combine_splits if self.kernel == "combine" else combine_segments
        combine(split_results(None, query, 15), rows, 1, sinks, torch.empty_like(query))


def representative(arch: int) -> list[Variant]:
    """Return a small sample, which has each kind of each parameter."""
    decode, prefill = Variant("decode", 128), Variant("prefill", 128)
    everything = {"window": 1000, "softcap": 30.0, "sinks": True}
    half = {"formats": FORMATS[1], "group": 1, "window": 1024, "block_size": 32, "layout": "HND"}
    coded = {"formats": FORMATS[3], "sinks": True, "ids": torch.int32, "lens": torch.int64}
    combine, segments = Variant("combine", 128), Variant("segments", 128)
    everywhere = [
        decode,
        replace(decode, group=7, formats=FORMATS[4], block_size=64, **everything),
        replace(decode, head_dim=80, **half),
        replace(decode, head_dim=96, group=48),
        replace(decode, head_dim=256, group=71, kv_heads=1, softcap=30.0),
        replace(decode, head_dim=64, group=24, **coded),
        replace(decode, head_dim=192, formats=FORMATS[2]),
        replace(decode, head_dim=576, group=16, kv_heads=1),
        prefill,
        replace(prefill, window=1000),
        replace(prefill, group=3, formats=FORMATS[4], block_size=64, **everything),
        replace(prefill, head_dim=96, **half),
        replace(prefill, head_dim=80, group=17, softcap=30.0, block_size=64),
        replace(prefill, head_dim=256, group=71, kv_heads=1, softcap=30.0),
        replace(prefill, head_dim=64, **coded),
        replace(prefill, head_dim=192, formats=FORMATS[2]),
        replace(prefill, head_dim=576, group=128, kv_heads=1),
        segments,
        replace(segments, group=7, formats=FORMATS[4], block_size=64, **everything),
        replace(segments, head_dim=64, **coded),
        replace(segments, head_dim=256, group=71, kv_heads=1, softcap=30.0),
        replace(segments, head_dim=96, formats=FORMATS[2]),
        replace(combine, sinks=True),
        replace(combine, kernel="combine segments", sinks=True),
        replace(combine, head_dim=80, formats=FORMATS[1]),
    ]
    native = [replace(kernel, formats=FORMATS[5], group=8) for kernel in (decode, prefill)]
    if arch == 90:
        native.append(replace(prefill, head_dim=192, value_dim=128, group=1, kv_heads=16))
    return everywhere + [variant for variant in native if variant.runs_on(arch)]


def matrix(arch: int) -> list[Variant]:
    """Return each kernel with each head dim and format, and with kinds of its parameters.

    On sm_90, they are all kinds. The other GPUs, whose code is much the same, share them.

    The combining kernel reads no cache, so its formats are only those of the query. Latents are
    not attended in segments, expanded or not, and they are combined like other heads.
    """
    variants = []
    shapes = [
        *product(PARAMETERS, [(dim, None) for dim in HEAD_DIMS], FORMATS),
        *product(("decode", "prefill"), [(dim, None) for dim in LATENTS], FORMATS),
        *product(("prefill",), EXPANDED_DIMS, FORMATS[:3]),
    ]
    for kernel, (head_dim, value_dim), formats in shapes:
        if kernel.startswith("combine") and formats[0] != formats[1]:
            continue
        alike = [one for one in _ALIKE[arch] if Variant(kernel, head_dim, formats).runs_on(one)]
        if arch not in alike:
            continue
        rng = random.Random(f"{_ALIKE[arch]} {kernel} {head_dim} {formats}")
        rows = covering(PARAMETERS[kernel], rng)[alike.index(arch) :: len(alike)]
        variants += [Variant(kernel, head_dim, formats, value_dim=value_dim, **row) for row in rows]
    return variants


def covering(parameters: Sequence[Parameter], rng: random.Random) -> list[dict[str, Any]]:
    """Return as few rows as needed to cover each kind of each parameter, randomly combined."""
    count = max(len(kinds) for kinds in parameters)
    columns = [_turns(kinds, count, rng) for kinds in parameters]
    return [dict(chain.from_iterable(map(dict.items, row))) for row in zip(*columns, strict=True)]


def _turns(kinds: Parameter, count: int, rng: random.Random) -> list[dict[str, Any]]:
    """Return `count` values in random order, taken from the kinds in turn."""
    order = islice(cycle(rng.sample(kinds, len(kinds))), count)
    values = [rng.choice(kind) for kind in order]
    rng.shuffle(values)
    return values
