"""Checks the kernels on this device at real sizes, against fp64 attention and torch operations.

Outputs are filled with NaN before each attention call, and each call runs twice: results that
differ indicate a data race. Layers with state, expanded latents and the kernels of
option.batch_invariant have their checks beside their benchmarks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.kernels import expanded, invariant, states
from benchmarks.gpu.paged_inputs import (
    TOLERANCE,
    Lengths,
    PagedInputs,
    Shape,
    dtype_name,
    make_inputs,
    ragged,
    random_cache,
    relative_error,
)
from kernels.arguments import LATENT_DIMS
from kernels.attention.paged_decode import paged_decode
from kernels.attention.paged_prefill import paged_prefill
from kernels.attention.prefill_splits import prefill_work
from kernels.attention.prefill_work import PrefillWork
from kernels.attention.work_list import UNIT, WAVES, make_work_list
from kernels.cache import block_copy, cache_write, rotary_cache_write, swap, torch_cache
from kernels.cache.cache_table import cache_table
from kernels.elementwise import torch_elementwise

KEY_SCALE, VALUE_SCALE = 0.5, 2.0


@dataclass(frozen=True, slots=True)
class Case:
    shape: Shape
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype | None = None
    block_size: int = 16
    layout: str = "NHD"
    options: dict[str, Any] = field(default_factory=dict)
    num_splits: int = 4
    """Splits per decoding sequence or per block of a prefill, on average. 1: no splits."""

    def __str__(self) -> str:
        cache = self.cache_dtype or self.dtype
        options = " ".join(f"{name}={value}" for name, value in self.options.items())
        types = f"{dtype_name(self.dtype)} over {dtype_name(cache)}"
        return f"{self.shape} {types} {self.block_size} {self.layout} {options}".strip()


def run(bench: Bench) -> None:
    _moves(bench)
    states.check(bench)
    invariant.check(bench)
    expanded.check(bench)
    for case in _dry_cases() if bench.is_dry else _cases():
        if bench.has_no_time_for(f"{case} and the remaining cases"):
            return
        bench.attempt(str(case), lambda case=case: _attention(bench, case))


def _cases() -> Iterator[Case]:
    fp8 = (torch.uint8, torch.float8_e4m3fn)
    half, single = torch.float16, torch.float32
    usual = Shape(32, 8, 128)
    extras = {"window": 300, "softcap": 30.0, "sinks": True}
    yield Case(usual)
    yield Case(Shape(32, 32, 128), layout="HND", num_splits=1)
    yield from (Case(usual, cache_dtype=dtype, options={"scales": True}) for dtype in fp8)
    yield Case(usual, options=extras)
    yield Case(usual, block_size=32, options={"window": 300}, num_splits=16)
    yield Case(usual, half, block_size=64)
    yield Case(usual, single)
    yield from _latents()
    for dtype, cache_dtype in ((None, None), (half, fp8[1]), (single, None)):
        yield Case(Shape(32, 4, 512), dtype or torch.bfloat16, cache_dtype)
    for dim in (64, 80, 96, 192, 256):
        yield Case(Shape(16, 4, dim), layout="HND")
    yield Case(Shape(28, 4, 128), options={"softcap": 50.0}, num_splits=64)
    yield Case(Shape(64, 1, 128))
    for dim in (64, 256):
        yield Case(Shape(16, 4, dim), cache_dtype=torch.uint8, options={"scales": True} | extras)
    yield Case(usual, half, torch.float8_e4m3fn, options={"scales": True})


def _latents() -> Iterator[Case]:
    """Yield the heads of DeepSeek V3, of V2 Lite, and of GLM-4.7-Flash."""
    large, small = LATENT_DIMS
    for heads in (128, 16, 20):
        yield Case(Shape(heads, 1, *large))
    yield Case(Shape(32, 1, *small), num_splits=16)
    yield Case(Shape(128, 1, *large), cache_dtype=torch.uint8, options={"scales": True})
    yield Case(Shape(16, 1, *large), torch.float16, torch.float8_e4m3fn, options={"scales": True})
    yield Case(Shape(128, 1, *large), torch.float16, block_size=64)
    for dims in LATENT_DIMS:
        yield Case(Shape(16, 1, *dims), torch.float32)


def _dry_cases() -> Iterator[Case]:
    yield Case(Shape(2, 1, 64), torch.float16, options={"window": 200, "sinks": True})
    yield Case(Shape(3, 1, *LATENT_DIMS[1]), torch.float16, num_splits=1)
    yield Case(Shape(2, 1, 512), torch.float16, num_splits=1)
    options = {"softcap": 9.0, "scales": True}
    yield Case(Shape(2, 2, 64), torch.float16, torch.uint8, 32, "HND", options, 2)


def _attention(bench: Bench, case: Case) -> None:
    few = (1, 15, 17, 250) if bench.is_dry else (1, 15, 16, 17, 255, 4096)
    decode = few if bench.is_dry else few + ragged(26, 4096)
    queries = (1, 5, 16) if bench.is_dry else (1, 1, 5, 16, 129, 1024, 512)
    contexts = (70, 250, 16) if bench.is_dry else (1, 900, 25, 16, 500, 1024, 3000)
    options = dict(case.options)
    if options.pop("scales", False):
        options |= {"key_scale": KEY_SCALE, "value_scale": VALUE_SCALE}
    if options.get("sinks"):
        options["sinks"] = torch.randn(case.shape.heads, device=bench.device)
    results = {}
    for name, lengths in (
        ("decode", Lengths((1,) * len(decode), decode)),
        ("prefill", Lengths(queries, contexts)),
    ):
        inputs = make_inputs(
            case.shape, lengths, device=bench.device, dtype=case.dtype,
            cache_dtype=case.cache_dtype, block_size=case.block_size, layout=case.layout,
        )  # fmt: skip
        results[name] = _compare(inputs, _attend(inputs, name, case, options), options)
    is_right = all(error < TOLERANCE[case.dtype] for error in results.values())
    bench.row(case=str(case), **results, verdict="ok" if is_right else "WRONG")


def _attend(
    inputs: PagedInputs, name: str, case: Case, options: dict[str, Any]
) -> Callable[[Tensor], Any]:
    caches = (inputs.key_cache, inputs.value_cache)
    paged = (inputs.query, *caches, inputs.tables[0])
    options = options | {"scale": inputs.scale}
    lens, num_splits = inputs.context_lens, case.num_splits
    window = options.get("window")
    num_wanted = num_splits * len(lens) if num_splits > 1 else 0

    def prefill(out: Tensor) -> None:
        work = _prefill_work(inputs, num_splits, window)
        paged_prefill(*paged, inputs.query_starts, lens, work=work, out=out, **options)

    def decode(out: Tensor) -> None:
        work = make_work_list(lens, num_wanted, window=window, min_split_keys=UNIT)
        paged_decode(*paged, lens, work=work, out=out, **options)

    return prefill if name == "prefill" else decode


def _prefill_work(inputs: PagedInputs, num_splits: int, window: int | None) -> PrefillWork:
    """Return a work list with room for `num_splits` splits per block on average; 1: no splits."""
    sizes = (inputs.query, inputs.key_cache, inputs.query_starts, inputs.context_lens)
    whole = prefill_work(*sizes, 0, window=window)
    if num_splits == 1:
        return whole
    num_wanted = num_splits * len(whole.items)
    # If whole blocks would fill more than half of the GPU, splits of fewer than
    # WAVES * min_split_keys keys are not made.
    work = prefill_work(*sizes, num_wanted, window=window, min_split_keys=UNIT // WAVES)
    assert (work.items[:num_wanted, 0] >= 0).any(), "no block is split"
    return work


def _compare(
    inputs: PagedInputs, attend: Callable[[Tensor], Any], options: dict[str, Any]
) -> float:
    """Return the relative error, or infinity if the two calls differ or a NaN remains."""
    first, second = inputs.new_out(), inputs.new_out()
    attend(first)
    attend(second)
    error = relative_error(first, inputs.exact(**options))
    return error if torch.equal(first, second) and error == error else float("inf")


def _moves(bench: Bench) -> None:
    types = [bench.dtype, torch.uint8]
    if not bench.is_dry:
        types.append(torch.float8_e4m3fn)
    for layout in ("NHD", "HND"):
        for dtype in types:
            case = f"cache write {dtype_name(dtype)} {layout}"
            bench.attempt(case, partial(_cache_write, bench, dtype, layout, case))
            case = f"rotary and {case}"
            bench.attempt(case, partial(_rotary_write, bench, dtype, layout, case))
        case = f"block moves {layout}"
        bench.attempt(case, partial(_block_moves, bench, layout, case))


def _caches(bench: Bench, dtype: torch.dtype, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return K, V and the slots to write, some of which are padding."""
    num_blocks, kv_heads, dim = (4, 1, 64) if bench.is_dry else (256, 8, 128)
    pool = (num_blocks, 16, kv_heads, dim)
    keys, values = (random_cache(pool, dtype, layout, bench.device) for _ in range(2))
    slots = torch.randperm(num_blocks * 16, device=bench.device)[: num_blocks * 8]
    slots[::7] = -1
    return keys, values, slots


def _cache_write(bench: Bench, dtype: torch.dtype, layout: str, case: str) -> None:
    keys, values, slots = _caches(bench, dtype, layout)
    kv_heads, dim = keys.shape[2:]
    expected = [keys.clone(), values.clone()]
    rows = torch.randn(2, len(slots), kv_heads, dim, device=bench.device).to(bench.dtype) * 99
    scales = {"key_scale": KEY_SCALE, "value_scale": VALUE_SCALE}
    cache_write.write_kv(rows[0], rows[1], keys, values, slots, **scales)
    torch_cache.write_kv(rows[0], rows[1], expected[0], expected[1], slots, **scales)
    _verdict(bench, case, [keys, values], expected)


def _rotary_write(bench: Bench, dtype: torch.dtype, layout: str, case: str) -> None:
    keys, values, slots = _caches(bench, dtype, layout)
    kv_heads, dim = keys.shape[2:]
    heads = (4 * kv_heads, kv_heads, kv_heads)
    rows = torch.randn(len(slots), sum(heads), dim, device=bench.device).to(bench.dtype)
    angle = torch.rand(len(slots), dim // 2, device=bench.device) * 7
    cos, sin = angle.cos().to(bench.dtype), angle.sin().to(bench.dtype)
    scales = {"key_scale": KEY_SCALE, "value_scale": VALUE_SCALE}
    query, key, value = rows.clone().split(heads, 1)
    expected = [query, keys.clone(), values.clone()]
    torch_elementwise.rotary(query, key, cos, sin, dim)
    torch_cache.write_kv(key, value, expected[1], expected[2], slots, **scales)
    query, key, value = rows.split(heads, 1)
    rotary_cache_write.rotary_write_kv(
        query, key, value, cos, sin, dim, keys, values, slots, **scales
    )
    _verdict(bench, case, [query, keys, values], expected)


def _block_moves(bench: Bench, layout: str, case: str) -> None:
    num_blocks, dim = (8, 64) if bench.is_dry else (256, 128)
    caches = [
        random_cache((num_blocks, 16, 2, dim), dtype, layout, bench.device)
        for dtype in (bench.dtype, bench.dtype, torch.uint8)
    ]
    expected = [cache.clone() for cache in caches]
    ids = torch.randperm(num_blocks, device=bench.device)
    sources, targets = ids[: num_blocks // 2], ids[num_blocks // 2 :]
    for copies, swaps, memory in ((block_copy, swap, caches), (torch_cache, torch_cache, expected)):
        table = cache_table(memory)
        staging = table.addresses.new_empty(len(sources), table.words_per_block)
        copies.copy_blocks(table, torch.stack([sources[::2], targets[::2]], 1))
        swaps.gather_blocks(table, sources, staging)
        swaps.scatter_blocks(table, targets, staging)
    _verdict(bench, case, caches, expected)


def _verdict(bench: Bench, case: str, results: list[Tensor], expected: list[Tensor]) -> None:
    pairs = zip(results, expected, strict=True)
    is_equal = all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in pairs
    )
    bench.row(case=case, verdict="ok" if is_equal else "WRONG")
