"""Tile sizes per GPU and shape, from configurations.json; nothing is tuned at run time.

A kernel uses the first of its rows whose `when` matches. `when` may give lists of accepted
values for `arch` (90 is sm_90), `head_dim`, `group` (query heads per KV head), `query_bits` and
`kv_bits`, and the largest group, `max_group`. Rows without `arch` fit the smallest supported GPU.
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
    """Maximum rows in a tile. A row is a query head; in prefill, a query head of one token."""
    block_n: int
    """Keys in a tile."""
    num_warps: int
    num_stages: int
    """Triton's pipeline depth. K and V have this many buffers in shared memory if tensor cores read
    them from there (wgmma), and one less if they read registers (mma.sync)."""
    max_registers: int | None = None
    """Limit of registers per thread. If None, the assembler chooses. It may then spill registers so
    that more programs fit on a multiprocessor, not knowing that shared memory has no room for more
    programs."""
    programs_per_processor: int = 1
    """Programs for which a streaming multiprocessor has enough shared memory and registers at once.
    The number of splits of the keys depends on it."""


def attention_configuration(
    kernel: str, head_dim: int, group: int, query_dtype: torch.dtype, kv_dtype: torch.dtype
) -> AttentionConfiguration:
    """Return the row for the current GPU. kernel: "decode" or "prefill"."""
    return _lookup(kernel, current_arch(), head_dim, group, query_dtype, kv_dtype)


def current_arch() -> int:
    """Return the current GPU's arch, such as 90 for sm_90.

    Returns 0 in Triton's interpreter, which uses the rows without `arch`.
    """
    if knobs.runtime.interpret:
        return 0
    active: Any = driver.active
    return _arch(active, active.get_current_device())


@cache
def _arch(active: Any, device: int) -> int:
    """Cache the arch of a device: Triton's active driver would ask torch each time."""
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
        if _matches(row["when"], shape):
            return AttentionConfiguration(**row["use"])
    raise LookupError(f"{TABLE.name} has no row for {kernel} of {shape}")


def _matches(when: dict[str, Any], shape: dict[str, int]) -> bool:
    return all(
        shape["group"] <= accepted if name == "max_group" else shape[name] in accepted
        for name, accepted in when.items()
    )


@cache
def _table() -> dict[str, list[dict[str, Any]]]:
    return json.loads(TABLE.read_text())
