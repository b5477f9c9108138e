"""Attention kernels as they were before they loaded block ids one tile ahead, for comparison.

The product has no switch for it. Each predecessor is the product's own module, compiled again with
one statement moved, so that nothing else differs.
"""

from __future__ import annotations

import inspect
import linecache
from types import ModuleType
from typing import Any

from kernels import paged_decode, paged_prefill

_DECODE_AHEAD = """\
        rows = row_offsets(blocks, tile, block_stride, token_stride, BLOCK_SIZE, BLOCK_N, PRECISION)
        blocks = block_ids(table_row_ptr, tile + 1, end_key, BLOCK_SIZE, BLOCK_N)
"""
_DECODE_LATE = """\
        blocks = block_ids(table_row_ptr, tile, end_key, BLOCK_SIZE, BLOCK_N)
        rows = row_offsets(blocks, tile, block_stride, token_stride, BLOCK_SIZE, BLOCK_N, PRECISION)
"""
_PREFILL_START = """\
        key_position = tile * BLOCK_N + tl.arange(0, BLOCK_N)
"""
_PREFILL_AHEAD = """\
        blocks = block_ids(table_ptr, tile + 1, context_len, BLOCK_SIZE, BLOCK_N).to(tl.int32)
"""
_PREFILL_LATE = _PREFILL_START + _PREFILL_AHEAD.replace("tile + 1", "tile")


def decode_without_ids_ahead() -> Any:
    """Return `kernels.paged_decode` with block ids loaded in the iteration that uses them."""
    return _edited(paged_decode, {_DECODE_AHEAD: _DECODE_LATE})


def prefill_without_ids_ahead() -> Any:
    """Return `kernels.paged_prefill` with block ids loaded in the iteration that uses them."""
    return _edited(paged_prefill, {_PREFILL_AHEAD: "", _PREFILL_START: _PREFILL_LATE})


def _edited(module: ModuleType, edits: dict[str, str]) -> ModuleType:
    """Return a new module from a module's source in which each text is replaced.

    Raises ValueError unless each text occurs once.
    """
    source = inspect.getsource(module)
    for old, new in edits.items():
        if source.count(old) != 1:
            raise ValueError(f"{module.__name__} does not have these lines once:\n{old}")
        source = source.replace(old, new)
    edited = ModuleType(f"{module.__name__}_predecessor")
    path = f"<{edited.__name__}>"
    # Triton reads the source of its kernels from here.
    linecache.cache[path] = len(source), None, source.splitlines(keepends=True), path
    exec(compile(source, path, "exec"), vars(edited))
    return edited
