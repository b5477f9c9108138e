"""Tile sizes per GPU and shape, measured once and kept in configurations.json; no run-time tuning.

Of the rows of a kernel, the first holds whose `when` names nothing that differs. `when` may name
`arch` (90 is sm_90), `head_dim`, `group` (query heads per KV head), `query_bits` and `kv_bits`,
each as a list. Rows that name no `arch` fit the smallest supported GPU.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from triton import knobs
from triton.runtime import driver

TABLE = Path(__file__).with_name("configurations.json")


@dataclass(frozen=True, slots=True)
class AttentionConfiguration:
    block_m: int
    """Rows of a tile at most: query heads, times query tokens in prefill."""
    block_n: int
    """Keys of a tile."""
    num_warps: int
    num_stages: int
    """Tiles of K and V in flight, the one at work included."""
    max_registers: int | None = None
    """A thread may have. Without, the assembler may spill to have fewer, for more programs at once,
    and cannot know that shared memory has no room for those."""
    min_split_keys: int = 256
    """Decode: no split has less, or combining costs more than it gains."""


def attention_configuration(
    kernel: str, head_dim: int, group: int, query_dtype: torch.dtype, kv_dtype: torch.dtype
) -> AttentionConfiguration:
    """The row for the current GPU. `kernel`: "decode" or "prefill"."""
    return _lookup(kernel, current_arch(), head_dim, group, query_dtype, kv_dtype)


def num_splits(num_rows: int, num_kv_heads: int, num_processors: int, max_context_len: int) -> int:
    """Splits of a decode batch of `num_rows`, captured once for all contexts up to a length.

    The smallest power of two that gives every streaming multiprocessor two programs, and up to four
    splits where one long context could keep a large batch waiting; none shorter than 256 keys at
    that length, and at most 64. How long the contexts of a step are does not enter: splits that
    would be too short find no work and end at once.
    """
    to_fill = -(-2 * num_processors // (num_rows * num_kv_heads))
    to_balance = min(-(-max_context_len // 8192), 4)
    wanted = min(max(to_fill, to_balance), -(-max_context_len // 256), 64)
    return 1 << (wanted - 1).bit_length()


def current_arch() -> int:
    """90 for sm_90; 0 in Triton's interpreter, which gets the rows for any arch."""
    if knobs.runtime.interpret:
        return 0
    active: Any = driver.active
    return _arch(active, active.get_current_device())


@cache
def _arch(active: Any, device: int) -> int:
    """Of a device of Triton's active driver, which asks torch each time."""
    return active.get_current_target().arch


@cache
def _lookup(
    kernel: str,
    arch: int,
    head_dim: int,
    group: int,
    query_dtype: torch.dtype,
    kv_dtype: torch.dtype,
) -> AttentionConfiguration:
    shape = {
        "arch": arch,
        "head_dim": head_dim,
        "group": group,
        "query_bits": query_dtype.itemsize * 8,
        "kv_bits": kv_dtype.itemsize * 8,
    }
    for row in _table()[kernel]:
        if all(shape[name] in values for name, values in row["when"].items()):
            return AttentionConfiguration(**row["use"])
    raise LookupError(f"{TABLE.name} has no row for {kernel} of {shape}")


@cache
def _table() -> dict[str, list[dict[str, Any]]]:
    return json.loads(TABLE.read_text())
