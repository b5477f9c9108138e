"""Searches tile sizes for this GPU and writes a configuration table with the best ones first.

Starting from the configuration in use, one setting is changed at a time and kept if it is faster.
That takes a few compilations per shape instead of the whole product of settings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.kernels.decode import decode_calls
from benchmarks.gpu.kernels.prefill import prefill_calls, prompts
from benchmarks.gpu.occupancy import using, with_programs
from benchmarks.gpu.paged_inputs import DRY_SHAPES, SHAPES, Lengths, PagedInputs, Shape, make_inputs
from kernels.configurations import (
    TABLE,
    AttentionConfiguration,
    attention_configuration,
    current_arch,
)

CHOICES = {
    "decode": {"block_n": (32, 64, 128), "num_warps": (2, 4, 8), "num_stages": (2, 3, 4)},
    "prefill": {"block_n": (32, 64, 128), "num_stages": (2, 3), "num_warps": (4, 8)},
}
LEAST_GAIN = 0.02
"""Smallest relative speed-up that counts; anything less is noise."""
MOST_REGISTERS = 255
"""Registers that a thread can have."""


def run(bench: Bench) -> None:
    rows: dict[str, list[dict[str, Any]]] = {"decode": [], "prefill": []}
    for kernel, shape, cache_dtype in _cases(bench):
        case = f"{kernel} {shape} {cache_dtype}"
        if bench.has_no_time_for(f"{case} and the remaining cases"):
            break
        search = partial(_search, bench, kernel, shape, cache_dtype)
        best = bench.attempt(case, search)
        if best is not None:
            rows[kernel].append(
                {"when": _when(shape, bench.dtype, cache_dtype), "use": asdict(best)}
            )
    bench.table(_merged(json.loads(TABLE.read_text()), rows))


def _cases(bench: Bench) -> Iterator[tuple[str, Shape, torch.dtype]]:
    if bench.is_dry:
        yield "decode", DRY_SHAPES[1], bench.dtype
        return
    for kernel in ("decode", "prefill"):
        for shape in reversed(SHAPES):
            yield kernel, shape, bench.dtype
    for shape in reversed(SHAPES):
        yield "decode", shape, torch.float8_e4m3fn


def _search(
    bench: Bench, kernel: str, shape: Shape, cache_dtype: torch.dtype
) -> AttentionConfiguration:
    group = shape.heads // shape.kv_heads
    current = attention_configuration(kernel, shape.head_dim, group, bench.dtype, cache_dtype)
    time = partial(_time, bench, kernel, shape, _inputs(bench, kernel, shape, cache_dtype))
    best, fastest = time(current)
    first = fastest
    for setting, values in CHOICES[kernel].items():
        for value in values[:1] if bench.is_dry else values:
            if value == getattr(best, setting):
                continue
            if bench.has_no_time_for(f"the remaining settings of {kernel} {shape}"):
                continue
            candidate, us = time(_changed(best, setting, value))
            if us is not None and fastest is not None and us < fastest * (1 - LEAST_GAIN):
                best, fastest = candidate, us
    bench.row(
        kernel=kernel,
        shape=str(shape),
        kv=str(cache_dtype).removeprefix("torch."),
        best=" ".join(f"{name}={value}" for name, value in asdict(best).items()),
        us={"best": fastest, "before": first},
    )
    return best


def _changed(best: AttentionConfiguration, setting: str, value: int) -> AttentionConfiguration:
    """Return the configuration with another value.

    Another block_n or num_warps changes how many registers a thread needs. So max_registers, if it
    is set, is then raised to MOST_REGISTERS.
    """
    changed = replace(best, **{setting: value})
    if setting == "num_stages" or best.max_registers is None:
        return changed
    return replace(changed, max_registers=MOST_REGISTERS)


def _inputs(bench: Bench, kernel: str, shape: Shape, cache_dtype: torch.dtype) -> PagedInputs:
    length = 24 if bench.is_dry else 4096
    batch = 2 if bench.is_dry else 64 if kernel == "decode" else 4
    lengths = prompts(batch, length)
    if kernel == "decode":
        lengths = Lengths((1,) * batch, lengths.contexts)
    return make_inputs(
        shape, lengths, device=bench.device, dtype=bench.dtype, cache_dtype=cache_dtype
    )


def _calls(bench: Bench, kernel: str, shape: Shape, inputs: PagedInputs) -> list[Callable[[], Any]]:
    return decode_calls(bench, inputs, shape) if kernel == "decode" else prefill_calls(inputs)


def _time(
    bench: Bench,
    kernel: str,
    shape: Shape,
    inputs: PagedInputs,
    configuration: AttentionConfiguration,
) -> tuple[AttentionConfiguration, float | None]:
    """Return the configuration with as many programs as fit, and the microseconds per call.

    The time is None if the configuration cannot be run on this GPU.
    """

    def measure() -> tuple[AttentionConfiguration, float | None]:
        fitted = configuration
        if not bench.is_dry:
            call = _calls(bench, kernel, shape, inputs)[0]
            fitted = with_programs(kernel, configuration, call)
        with using(kernel, fitted):  # the number of programs decides the number of splits
            return fitted, bench.time_us(_calls(bench, kernel, shape, inputs))

    return bench.attempt(f"{kernel} with {configuration}", measure) or (configuration, None)


def _when(shape: Shape, dtype: torch.dtype, cache_dtype: torch.dtype) -> dict[str, list[int]]:
    return {
        "arch": [current_arch()],
        "head_dim": [shape.head_dim],
        "group": [shape.heads // shape.kv_heads],
        "query_bits": [dtype.itemsize * 8],
        "kv_bits": [cache_dtype.itemsize * 8],
    }


def _merged(
    table: dict[str, list[dict[str, Any]]], found: dict[str, list[dict[str, Any]]]
) -> dict[str, list[dict[str, Any]]]:
    """Put the new rows first and drop old rows with exactly the same condition.

    Kernels without new rows keep theirs.
    """
    merged = dict(table)
    for kernel, rows in found.items():
        conditions = [row["when"] for row in rows]
        merged[kernel] = rows + [row for row in table[kernel] if row["when"] not in conditions]
    return merged
