"""Prompts over latents (DeepSeek's MLA): expanded to K and V of every head, and absorbed.

Times include what only one form needs: the expansion, or the products that absorb the queries and
map what they attended to V.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.kernels.peers import Calls
from benchmarks.gpu.kernels.prefill import work_by_rule
from benchmarks.gpu.paged_inputs import (
    Lengths,
    PagedInputs,
    Shape,
    dtype_name,
    make_inputs,
    relative_error,
)
from kernels.arguments import EXPANDED_DIMS, LATENT_DIMS
from kernels.attention.latents import expand_latents
from kernels.attention.paged_prefill import paged_prefill

KEY_DIM, VALUE_DIM = EXPANDED_DIMS[0]
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Limits of the relative difference of both forms. They round different numbers to 16 bits."""


@dataclass(frozen=True, slots=True)
class Case:
    heads: int
    batch: int
    new: int
    context: int
    dims: tuple[int, int] = LATENT_DIMS[0]
    """Of a row, and of its latent."""

    def __str__(self) -> str:
        return f"{self.heads} heads, {self.batch} x {self.new} new tokens of {self.context}"

    @property
    def shape(self) -> Shape:
        return Shape(self.heads, 1, *self.dims)

    @property
    def lengths(self) -> Lengths:
        return Lengths((self.new,) * self.batch, (self.context,) * self.batch)

    @property
    def flop(self) -> int:
        """The FLOPs of the expansion and of the attention."""
        plain = KEY_DIM + VALUE_DIM - (self.dims[0] - self.dims[1])
        expansion = 2 * self.batch * self.context * self.dims[1] * plain
        num_pairs = self.lengths.flop(Shape(1, 1, 1)) // 4
        return self.heads * (expansion + 2 * (KEY_DIM + VALUE_DIM) * num_pairs)


class Inputs(NamedTuple):
    latents: PagedInputs
    query: Tensor
    """[T, heads, KEY_DIM], not absorbed."""
    key_up: Tensor
    value_up: Tensor
    """See `expand_latents`."""


def run(bench: Bench) -> None:
    for case in _dry_cases() if bench.is_dry else _cases():
        if bench.has_no_time_for(f"{case} and the remaining cases"):
            return
        bench.attempt(str(case), lambda case=case: _measure(bench, case))


def check(bench: Bench) -> None:
    """Check that both forms give the same numbers."""
    cases = _dry_cases() if bench.is_dry else [Case(16, 2, 500, 900), Case(128, 1, 200, 200)]
    for dtype in (bench.dtype,) if bench.is_dry else TOLERANCE:
        for case in cases:
            bench.attempt(str(case), lambda case=case, dtype=dtype: _check(bench, case, dtype))


def expanded_calls(bench: Bench, inputs: Inputs) -> Calls:
    """Return a call for each block table that expands its contexts and attends over them."""
    latents, query = inputs.latents, inputs.query
    block_size = latents.key_cache.shape[1]
    table = torch.arange(latents.tables[0].numel(), dtype=torch.int32, device=query.device)
    table = table.view(latents.tables[0].shape)

    def expanded(blocks: Tensor) -> tuple[Tensor, Tensor]:
        rows = latents.key_cache.index_select(0, blocks.flatten()).flatten(0, 2)
        joined = expand_latents(rows, inputs.key_up, inputs.value_up)
        keys, values = joined.unflatten(0, (-1, block_size)).tensor_split([KEY_DIM], -1)
        return keys, values

    keys, _ = expanded(latents.tables[0])
    work = work_by_rule(bench, replace(latents, query=query, key_cache=keys))

    def attend(blocks: Tensor) -> Tensor:
        keys, values = expanded(blocks)
        lengths = (latents.query_starts, latents.context_lens)
        return paged_prefill(query, keys, values, table, *lengths, scale=latents.scale, work=work)

    return [lambda blocks=blocks: attend(blocks) for blocks in latents.tables]


def absorbed_calls(bench: Bench, inputs: Inputs) -> Calls:
    """Return a call for each block table that absorbs the queries and attends over the latents."""
    latents, query, key_up, value_up = inputs
    nope = key_up.shape[1]
    work, lengths = work_by_rule(bench, latents), (latents.query_starts, latents.context_lens)

    def attend(table: Tensor) -> Tensor:
        absorbed = torch.bmm(query[..., :nope].transpose(0, 1), key_up).transpose(0, 1)
        rows = torch.cat([absorbed, query[..., nope:]], -1)
        attended = paged_prefill(
            rows, latents.key_cache, latents.value_cache, table, *lengths,
            scale=latents.scale, work=work,
        )  # fmt: skip
        return torch.bmm(attended.transpose(0, 1), value_up).transpose(0, 1)

    return [lambda table=table: attend(table) for table in latents.tables]


def _cases() -> Iterator[Case]:
    """Yield prompts and a chunk after a prefix for DeepSeek V3 on eight GPUs and on one."""
    for heads in (16, 128):
        for lengths in ((1, 8192, 8192), (4, 2048, 2048), (1, 4096, 8192), (1, 512, 8192)):
            yield Case(heads, *lengths)


def _dry_cases() -> Iterator[Case]:
    yield Case(3, 2, 9, 20, LATENT_DIMS[1])


def _make(case: Case, device: torch.device, dtype: torch.dtype, num_sets: int) -> Inputs:
    latents = make_inputs(case.shape, case.lengths, device=device, dtype=dtype, num_sets=num_sets)
    row, rank = case.dims
    nope = KEY_DIM - (row - rank)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    query = random(case.batch * case.new, case.heads, KEY_DIM)
    key_up, value_up = random(case.heads, nope, rank), random(case.heads, rank, VALUE_DIM)
    return Inputs(latents, query, key_up * rank**-0.5, value_up * rank**-0.5)


def _measure(bench: Bench, case: Case) -> None:
    itemsize = bench.dtype.itemsize
    kv_bytes = case.lengths.kv_bytes(case.shape, itemsize)
    num_sets = bench.num_sets(kv_bytes, max_sets=4)
    joined = Shape(case.heads, case.heads, KEY_DIM + VALUE_DIM, KEY_DIM + VALUE_DIM)
    scratch_bytes = case.lengths.kv_bytes(joined, itemsize)
    query_bytes = case.lengths.query_bytes(case.shape, itemsize)
    if not bench.fits(kv_bytes * num_sets + 2 * scratch_bytes + 4 * query_bytes, str(case)):
        return
    inputs = _make(case, bench.device, bench.dtype, num_sets)
    us = {
        "ours": bench.time_us(expanded_calls(bench, inputs)),
        "absorbed": bench.time_us(absorbed_calls(bench, inputs)),
    }
    fields = {"heads": case.heads, "batch": case.batch, "new": case.new, "context": case.context}
    bench.row(**fields, flop=case.flop, us=us)


def _check(bench: Bench, case: Case, dtype: torch.dtype) -> None:
    inputs = _make(case, bench.device, dtype, 1)
    (expanded,), (absorbed,) = (calls(bench, inputs) for calls in (expanded_calls, absorbed_calls))
    error = relative_error(expanded(), absorbed())
    verdict = "ok" if error < TOLERANCE[dtype] else "WRONG"
    name = f"expanded latents in {dtype_name(dtype)}, {case}"
    bench.row(case=name, prefill=error, verdict=verdict)
