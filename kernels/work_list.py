"""Which keys of which sequence each program of a decode attends over.

Sequences get programs in proportion to their keys, so one long context among short ones keeps none
waiting. The list is made on the device, and its size depends only on shapes: a CUDA graph that
makes it can be replayed with other context lengths. All layers of a step share it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MIN_SPLIT_KEYS = 256
"""Fewest keys in a split; with less, combining would cost more than it gains."""
UNIT = 128
"""Splits begin at multiples of this many keys, and so of every tile."""
BALANCED_KEYS = 2048
"""A context of no more keys cannot keep a batch that fills the GPU waiting for long."""
FULL = 0.9
"""A batch of this many sequences for each program fills the GPU well enough without splits."""
WAVES = 4
"""How often the splits of a batch that fills the GPU fill it, at most: with more and shorter ones,
the last to end would save less time than the others would lose."""


@dataclass(frozen=True, slots=True)
class WorkList:
    """I items for N sequences."""

    items: Tensor
    """[I, 4] int32: sequence (-1 if there is nothing to do), first key, key past the last, and how
    many items the sequence has."""
    rows: Tensor
    """[N, 3] int32: sequence, its first item, and how many items it has."""


def wanted_splits(num_rows: int, num_programs: int, max_context_len: int) -> int:
    """Return how many splits a batch of `num_rows` should have; 0 if it should not be split.

    num_programs: how many sequences or splits the GPU can attend over at once. max_context_len:
    the longest context that may ever come. The contexts at hand do not matter, so a graph can be
    captured. A few sequences are split to fill the GPU once: splits that do not fit would wait for
    the others to end. If whole sequences fill more than half of it, splits are WAVES times as
    short; unless they fill it and none can be long.
    """
    is_full = num_rows >= FULL * num_programs
    if max_context_len < 2 * MIN_SPLIT_KEYS or (is_full and max_context_len <= BALANCED_KEYS):
        return 0
    waves = 1 if 2 * num_rows <= num_programs else WAVES
    return min(waves * num_programs, num_rows * (max_context_len // MIN_SPLIT_KEYS))


def max_items(max_rows: int, num_programs: int, max_context_len: int) -> int:
    """Return the most items that a list of up to `max_rows` sequences may have."""
    if max_context_len < 2 * MIN_SPLIT_KEYS:
        return 0
    return max_rows + min(WAVES * num_programs, max_rows * (max_context_len // MIN_SPLIT_KEYS))


def make_work_list(
    context_lens: Tensor,
    num_wanted: int,
    *,
    window: int | None = None,
    min_split_keys: int = MIN_SPLIT_KEYS,
) -> WorkList:
    """Divide the keys of sequences that decode into about `num_wanted` splits, or none if it is 0.

    A sequence's share is rounded down, but it has at least one item, so I is num_wanted + N.
    context_lens: [N] int32 or int64, contiguous; a padding row, of length 0, gets an item without
    keys. window: only the last `window` keys count. min_split_keys: fewest keys in a split; with a
    window, the first one may have up to UNIT fewer.

    Raises ValueError if `min_split_keys` is not a multiple of UNIT.
    """
    if min_split_keys < UNIT or min_split_keys % UNIT:
        raise ValueError(f"min_split_keys is {min_split_keys}; it must be a multiple of {UNIT}")
    num_rows, device = len(context_lens), context_lens.device
    length = num_wanted + num_rows
    items = torch.empty(length, 4, dtype=torch.int32, device=device)
    rows = torch.empty(num_rows, 3, dtype=torch.int32, device=device)
    work_list_kernel[(num_rows,)](
        items, rows, context_lens, num_rows, num_wanted, length,
        2**30 if window is None else window, min_split_keys, UNIT=UNIT, BLOCK=256,
    )  # fmt: skip
    return WorkList(items, rows)


@triton.jit
def _visible(context_ptr, row, end_row, window, UNIT: tl.constexpr):
    """Return the context lengths, first visible keys, and first and number of visible units.

    Rows from `end_row` on have none.
    """
    context_len = tl.load(context_ptr + row, mask=row < end_row, other=0).to(tl.int32)
    first_key = tl.maximum(context_len - window, 0)
    first = first_key // UNIT
    return context_len, first_key, first, tl.cdiv(context_len, UNIT) - first


@triton.jit
def _num_splits(num_keys, units, total, num_wanted, min_split_keys):
    """Return the number of items of sequences, `total` being the units of all of them."""
    share = (units.to(tl.int64) * num_wanted // total).to(tl.int32)
    return tl.maximum(tl.minimum(share, num_keys // min_split_keys), 1)


@triton.jit(
    do_not_specialize=["num_rows", "num_wanted", "length", "window", "min_split_keys"],
    do_not_specialize_on_alignment=["context_ptr"],
)
def work_list_kernel(
    items_ptr, rows_ptr, context_ptr, num_rows, num_wanted, length, window, min_split_keys,
    UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the items of one sequence, and after the last one's the idle items; grid (N,).

    Every program counts the items before its own again, so that none waits for another.
    """
    row = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    total = 0
    for first_row in range(0, num_rows, BLOCK):
        _, _, _, units = _visible(context_ptr, first_row + index, num_rows, window, UNIT)
        total += tl.sum(units, 0)
    total = tl.maximum(total, 1)
    start = 0
    for first_row in range(0, row, BLOCK):
        before = first_row + index
        context_len, first_key, _, units = _visible(context_ptr, before, row, window, UNIT)
        splits = _num_splits(context_len - first_key, units, total, num_wanted, min_split_keys)
        start += tl.sum(tl.where(before < row, splits, 0), 0)

    context_len, first_key, first, units = _visible(context_ptr, row, num_rows, window, UNIT)
    splits = _num_splits(context_len - first_key, units, total, num_wanted, min_split_keys)
    row_ptr = rows_ptr + row * 3
    tl.store(row_ptr, row)
    tl.store(row_ptr + 1, start)
    tl.store(row_ptr + 2, splits)
    for first_split in range(0, splits, BLOCK):
        split = first_split + index
        is_split = split < splits
        begin = (first + split * units // splits) * UNIT
        end = (first + (split + 1) * units // splits) * UNIT
        item_ptr = items_ptr + (start + split) * 4
        tl.store(item_ptr, row, mask=is_split)
        tl.store(item_ptr + 1, tl.maximum(begin, first_key), mask=is_split)
        tl.store(item_ptr + 2, tl.minimum(end, context_len), mask=is_split)
        tl.store(item_ptr + 3, splits, mask=is_split)
    if row == num_rows - 1:
        for first_idle in range(start + splits, length, BLOCK):
            idle = first_idle + index
            tl.store(items_ptr + idle * 4, -1, mask=idle < length)
